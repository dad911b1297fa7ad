"""What our own loggers say, and how much of it: ``--log-level``."""

from __future__ import annotations

import argparse
import logging

LEVELS = ("error", "warning", "info", "debug")
_PACKAGES = ("skippy_mesh", "stages", "coordinator")
_VERBOSITIES = ("error", "error", "warning", "info", "debug", "debug")  # llama-server's -lv


def level_of(argument: str) -> str:
    """A level by its name, or by llama-server's number."""
    if argument.isdecimal() and int(argument) < len(_VERBOSITIES):
        return _VERBOSITIES[int(argument)]
    if argument not in LEVELS:
        raise argparse.ArgumentTypeError(f"takes {', '.join(LEVELS)}, got {argument!r}")
    return argument


def set_up(level: str) -> None:
    """On stderr, from ``level`` on; of other libraries their warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


def set_up_all() -> None:
    """Whatever anybody has to say, other libraries and llama.cpp too."""
    set_up("debug")
    logging.getLogger().setLevel(logging.DEBUG)
