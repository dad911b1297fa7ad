"""The one door to llama.cpp: loads the library once and hands out the few ggml functions it lacks.

llama.cpp reads its environment and registers its kernels when it is loaded, so everything that must
be set before that is set here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import sys
from collections import deque
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

# A failed native assert ends the process; without this it first spawns a debugger and lingers.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# libgomp's threads spin about a millisecond at each of a step's thousand barriers. On a machine
# that does anything else besides, the spinning keeps the awaited thread from running, and a step
# takes ten times as long (bench/RESULTS.md, "Spinning").
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import llama_cpp

from skippy_mesh.errors import RuntimeUnavailableError

GGML_KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""Those of enum ggml_type that a cache may have."""

logger = logging.getLogger("llama.cpp")
_recent_errors: deque[str] = deque(maxlen=5)
_LEVELS = {
    2: logging.DEBUG,
    3: logging.INFO,
    4: logging.INFO,
}  # info, warn, error of ggml_log_level
_ERROR = 4


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: object) -> None:
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        _recent_errors.append(line)
    if line:
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


@functools.cache
def load_library() -> None:
    """Initialise llama.cpp for this process. Cheap when called again."""
    llama_cpp.llama_log_set(_on_log, None)
    llama_cpp.llama_backend_init()


_TILED = "GGML_CPU_TILED_MM"
_tiled_in_use: bool | None = None


def allow_tiled_kernels(allowed: bool) -> None:
    """Call before a model runs. llama.cpp reads the choice once, at its first matrix product, so
    the first caller decides for the process; one who needs it otherwise later gets an error."""
    global _tiled_in_use
    if _tiled_in_use is None:
        if not allowed:
            os.environ[_TILED] = "0"
        _tiled_in_use = os.environ.get(_TILED) != "0"
    if _tiled_in_use and not allowed:
        raise RuntimeUnavailableError(
            f"this process already runs llama.cpp with its tiled kernels: set {_TILED}=0"
        )


def last_error() -> str:
    """What llama.cpp last complained about, for the end of an error message."""
    return _recent_errors[-1] if _recent_errors else "no reason given"


@functools.cache
def library_dir() -> Path:
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    return Path(override) if override else Path(llama_cpp.__file__).parent / "lib"


@functools.cache
def ggml_base() -> ctypes.CDLL:
    """libggml-base, which exports what libllama does not."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(library_dir() / f"libggml-base.{suffix}"))


def tap_path() -> Path:
    """The compiled ``tap.c``. Sources that came alone, as ``ray job submit`` uploads them without
    what git ignores, hide the package installed on the machine; then it is that one's."""
    spec = importlib.util.find_spec("stages._tap") or PathFinder.find_spec(
        "stages._tap", [str(Path(entry, "stages")) for entry in sys.path]
    )
    if spec is None or spec.origin is None:
        raise RuntimeUnavailableError(
            "the compiled part of skippy_mesh is missing: install it with `pip install -e .` "
            "(or `make setup`), which needs a C compiler"
        )
    found = Path(spec.origin)
    _check_source(found.parent)
    return found


def _check_source(folder: Path) -> None:
    """A tap of other sources than these would be called with the wrong arguments."""
    here = Path(__file__).parent
    if folder == here:
        return
    try:
        is_same = (folder / "tap.c").read_bytes() == (here / "tap.c").read_bytes()
    except OSError:
        is_same = False
    if not is_same:
        raise RuntimeUnavailableError(
            f"skippy_mesh in {here.parent} is another version than the one installed in "
            f"{folder.parent}, whose compiled part it needs: install the same on every node"
        )


@functools.cache
def tap_library() -> ctypes.CDLL:
    """The compiled ``tap.c``, with its signatures declared."""
    tap = ctypes.CDLL(str(tap_path()))
    pointer = ctypes.c_void_p
    tap.tap_new.restype = pointer
    tap.tap_new.argtypes = [pointer] * 4 + [ctypes.c_char_p] * 2 + [ctypes.c_bool]
    tap.tap_free.argtypes = [pointer]
    tap.tap_begin.argtypes = [pointer, pointer, ctypes.c_size_t]
    tap.tap_rows.restype = pointer
    tap.tap_rows.argtypes = [
        pointer,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_long),
        ctypes.POINTER(ctypes.c_long),
        ctypes.POINTER(ctypes.c_int),
    ]
    return tap


def address_of(function: Any) -> int:
    """The address of a native function, to be handed to other native code."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
