"""Does this llama.cpp build run on this CPU? Asked once, in a child process, and remembered.

A CPU may advertise an instruction set and still kill the process on its first use (AMX on some
virtual machines), at the first step of more than one token. That must not happen to a stage, so a
tiny model with the quantised types that have such kernels is decoded in a child first. If the child
dies, it is tried again without weight repacking, which avoids those kernels and is slower.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from skippy_mesh.errors import RuntimeUnavailableError
from stages.disk import cache_dir, write_text
from stages.library import ended_by
from stages.native import library_dir, tap_path

logger = logging.getLogger(__name__)

PROBE_COMMAND = (sys.executable, "-m", "stages.probe_child")
_TIMEOUT_S = 120
_VERSION = "2"  # of what the probe does: an older verdict is not taken for a new one


def can_repack(command: Sequence[str] = PROBE_COMMAND) -> bool:
    """True if the library works as built, False if only without repacking.

    Raises :class:`RuntimeUnavailableError` if it works neither way.
    """
    key = hashlib.sha256("\n".join((_VERSION, machine_key(), *command)).encode()).hexdigest()[:16]
    memo = cache_dir() / "probe" / f"{key}.json"
    try:
        return bool(json.loads(memo.read_text())["can_repack"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    verdict = _probe(command)
    write_text(memo, json.dumps({"can_repack": verdict}))
    return verdict


def _probe(command: Sequence[str]) -> bool:
    failure = _run([*command, "repack"])
    if failure is None:
        return True
    if (second := _run([*command, "plain"])) is not None:
        raise RuntimeUnavailableError(
            f"llama.cpp does not run on this CPU ({failure}; without weight repacking: {second}); "
            f"rebuild its wheel on this machine: rm -r {cache_dir() / 'wheels'} && make setup"
        )
    logger.warning(
        "llama.cpp's repacked kernels do not run on this CPU (%s): continuing without them, slower",
        failure,
    )
    return False


def _run(command: Sequence[str]) -> str | None:
    """None if ``command`` succeeds, else how it died."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_TIMEOUT_S} s"
    return ended_by(done)


@functools.cache
def machine_key() -> str:
    """Changes with the builds of the library and of the tap, and the CPU's features: what decides
    how numbers round, and which of them are seen."""
    seen = [platform.machine()]
    for path in (tap_path(), *sorted(library_dir().glob("*"))):
        stat = path.stat()
        seen.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        seen += sorted({ln for ln in lines if ln.startswith(("model name", "flags", "Features"))})
    except OSError:
        seen.append(platform.processor())
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
