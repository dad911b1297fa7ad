"""Bytes: as people write them, how many this machine can still give, and this process has."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

from skippy_mesh.errors import UsageError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LIBC = ctypes.CDLL(None)
_SIZE = re.compile(r"(\d+)(?:\.(\d+))? ?([KMGT]?)(iB|B|i|)", re.IGNORECASE)


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h: ``uordblks`` in use in all arenas, ``hblkhd`` in mappings."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd",
                     "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


def parse_size(text: str) -> int:
    """The bytes in ``16GiB``, ``1.5G`` (both of 1024s), ``24GB`` (of 1000s) or ``1073741824``."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{text!r} is not a size: write bytes, or 16GiB, 900MiB, 24GB")
    whole, decimals, unit, suffix = found.groups()
    is_decimal = bool(unit) and suffix.upper() == "B"
    scale = (1000 if is_decimal else 1024) ** _UNITS[unit.upper()]
    decimals = decimals or ""
    # In integers: a float would lose bytes of a large size.
    num_bytes: int = int(whole + decimals) * scale // 10 ** len(decimals)
    return num_bytes


def format_size(num_bytes: int, *, round_up: bool = False) -> str:
    """Two decimals of the largest binary unit that leaves at least 1.

    With ``round_up`` no less than ``num_bytes``, so that whoever types it back in has enough.
    """
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    if not power:
        return f"{num_bytes}B"
    scale = 1024**power
    hundredths = (100 * num_bytes + (scale - 1 if round_up else scale // 2)) // scale
    return f"{hundredths // 100}.{hundredths % 100:02}{' KMGT'[power]}iB"


def available_bytes() -> int | None:
    """Memory this machine can still give, None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def process_bytes() -> tuple[int, int] | None:
    """Resident memory of this process, now and at its peak; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = {line.split()[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    if "VmRSS:" not in found or "VmHWM:" not in found:
        return None
    return int(found["VmRSS:"]) * 1024, int(found["VmHWM:"]) * 1024


def allocated_bytes() -> int:
    """What ``malloc`` has handed out in this process, 0 where the C library is not glibc 2.33.

    Resident memory would not tell what a new buffer takes: one that fits into what an earlier one
    left behind adds nothing to it.
    """
    if not hasattr(_LIBC, "mallinfo2"):
        return 0
    _LIBC.mallinfo2.restype = _MallocInfo
    info = _LIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def reset_peak() -> None:
    """The peak of :func:`process_bytes` is what it is now, where the system can forget."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
