"""What a result must say about where it was measured: machine, versions, commit, model file."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("skippy-mesh", "ray", "llama-cpp-python", "httpx", "uvicorn")


def first_value(path: str, label: str) -> str | None:
    """The value of a ``label : value`` line in a /proc file."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == label:
            return value.strip()
    return None


def machine_facts() -> dict[str, object]:
    memory = first_value("/proc/meminfo", "MemTotal")
    return {
        "cpu": first_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "kernel": platform.release(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> dict[str, object]:
    """The checkout's commit, and whether files differ from it; None where there is no git."""
    here = Path(__file__).resolve().parents[1]

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = ask("status", "--porcelain")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def model_facts(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def document_head(bench: str, model: Path) -> dict[str, object]:
    """What every document of results begins with."""
    return {
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **commit(),
        "machine": machine_facts(),
        "versions": versions(),
        "model": model_facts(model),
    }
