"""Which engine serves a class of models: what the gate found, and what follows from it.

``python -m bench gate`` compares the mesh with the single-lane engine it replaces and leaves its
verdicts in a file. A class that passed, or was never judged, is served by the mesh; one that failed
by the old engine. Undecided is no failure, and no pass either: it is said.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from skippy_mesh.errors import UsageError
from skippy_mesh.families import Family

Outcome = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: Outcome
    reason: str
    commit: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``engine`` is ``mesh`` or ``baseline``; ``why`` is for people."""

    engine: str
    why: str


_FORCED = {"mesh": "mesh, as asked", "baseline": "baseline, one request at a time, as asked"}


def choose_engine(asked: str, family: Family, verdicts: Mapping[str, Verdict]) -> Choice:
    """``asked`` is auto, mesh or baseline. A look-alike has the verdict of its class."""
    if asked != "auto":
        return Choice(asked, _FORCED[asked])
    name = family.confirms or family.name
    found = verdicts.get(name)
    if found is None:
        return Choice("mesh", f"mesh, no verdict of a gate yet for class {name}")
    if found.outcome == "fail":
        return Choice(
            "baseline",
            f"baseline, one request at a time: the mesh failed its gate for class {name} at "
            f"commit {found.commit} ({found.reason}); --engine mesh forces it",
        )
    said = "passed its gate" if found.outcome == "pass" else "its gate decided nothing"
    return Choice("mesh", f"mesh, {said} for class {name} at commit {found.commit}")


def gate_file() -> Path | None:
    """The verdicts that came with this installation; None if no gate was run for it."""
    spec = importlib.util.find_spec("bench")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "gate" / "verdicts.json").is_file():
            return path
    return None


def read_verdicts(path: Path | None) -> dict[str, Verdict]:
    """By class; none without a file."""
    if path is None:
        return {}
    try:
        document = json.loads(path.read_text())
        commit = str(document["commit"])[:7]
        return {name: _verdict(entry, commit) for name, entry in document["classes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path.name} of the gate cannot be read ({type(error).__name__}: {error}): run "
            f"`python -m bench gate`, or force an engine with --engine mesh"
        ) from error


def _verdict(entry: Mapping[str, Any], commit: str) -> Verdict:
    outcome = entry["verdict"]
    if outcome not in get_args(Outcome):
        raise ValueError(f"verdict is {outcome!r}")
    return Verdict(outcome=outcome, reason=str(entry["reason"]), commit=commit)
