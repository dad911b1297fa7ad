"""What can be said of llama.cpp on this machine, found out in a child: a build for another CPU may
end whoever loads it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_mesh.errors import RuntimeUnavailableError
from stages.disk import cache_dir

PACKAGES = ("skippy-mesh", "ray", "llama-cpp-python", "numpy")
CHILD = (sys.executable, "-m", "stages.library_child")
_TIMEOUT_S = 300
_ISA = (
    "sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "gfni", "vaes",  # x86
    "asimd", "i8mm", "bf16", "sve", "sme",  # ARM
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Library:
    """``features`` are what the library was compiled for, in its own words; ``tap_problem`` is why
    the compiled part of skippy_mesh does not load, None if it does."""

    folder: str
    features: tuple[str, ...]
    tap_problem: str | None


@dataclass(frozen=True, slots=True)
class Tried:
    """A stage over a whole model, loaded and proved: None if a row's bits are its own."""

    why_inexact: str | None
    load_s: float


def library(command: Sequence[str] = CHILD) -> Library:
    """:class:`RuntimeUnavailableError` if it does not load, with how the child ended."""
    found = _ask([*command, "library"])
    return Library(found["folder"], tuple(found["features"]), found["tap_problem"])


def try_stage(path: Path, *, kv_type: str, num_threads: int) -> Tried:
    """Load all layers of ``path`` with a small context and run the self-test."""
    found = _ask([*CHILD, "stage", str(path), kv_type, str(num_threads)])
    return Tried(found["why_inexact"], found["load_s"])


def versions() -> dict[str, str | None]:
    """Of what decides which numbers come out; None for a package that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def features_in(text: str) -> tuple[str, ...]:
    """Of ``CPU : SSE3 = 1 | AVX512 = 0 | REPACK = 1``, what is not 0."""
    found = []
    for part in text.split("|"):
        name, _, value = part.partition("=")
        if value.strip() not in ("", "0"):
            found.append(name.rpartition(":")[2].strip())
    return tuple(found)


def this_cpu() -> frozenset[str]:
    """What this CPU has, by the kernel's names; empty where nobody tells."""
    try:
        return cpu_features(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Of the text of ``/proc/cpuinfo`` what may choose a kernel."""
    lines = cpuinfo.splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(word for word in flags.partition(":")[2].split() if word.startswith(_ISA))


def cached_bytes() -> dict[str, int]:
    """What is kept in the cache, by kind."""
    sizes = {}
    for kind in ("slices", "selftest", "probe"):
        files = (path for path in (cache_dir() / kind).rglob("*") if path.is_file())
        sizes[kind] = sum(path.stat().st_size for path in files)
    return sizes


def ended_by(done: subprocess.CompletedProcess[bytes]) -> str | None:
    """How a child died; None if it did what it was for."""
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit {done.returncode}"
    return None


def _ask(command: Sequence[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeUnavailableError(f"no answer in {_TIMEOUT_S} s") from None
    if (reason := ended_by(done)) is not None:
        raise RuntimeUnavailableError(reason)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
