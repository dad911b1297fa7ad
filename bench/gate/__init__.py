"""Is the mesh fit to take over from the single-lane engine? ``python -m bench gate``.

For each class of models: answers first, then speed with 1 to 64 clients in paired rounds, a long
prompt alone, a shared prefix, and four times more clients than may run. Every row is kept as it
comes (``rows.jsonl``), so a gate that was stopped goes on. What came out is in ``verdicts.json``,
which ``serve --engine auto`` obeys.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.gate.arms import Arms, started
from bench.gate.play import Row, alone_of, exact_row, long_row, overload_row, point_row, prefix_row
from bench.gate.rules import Check, check_answers, check_exact, judge_case, judge_class
from bench.gate.settings import (
    CLASSES,
    FULL,
    QUICK,
    Case,
    Settings,
    default_cases,
    num_threads,
)
from bench.ledger import Ledger, set_aside
from bench.machine import commit, machine_facts, versions
from bench.points import write_json
from skippy_mesh.errors import SkippyError, UsageError

HERE = Path(__file__).parent
ROWS, VERDICTS = "rows.jsonl", "verdicts.json"

Start = Callable[[Case, Settings], AbstractContextManager[Arms]]
Work = tuple[str, Callable[[], Row]]


def works_of(case: Case, settings: Settings, arms: Arms, rows: Sequence[Row]) -> list[Work]:
    """The rows of a case after its answers, in the order they are measured: a whole curve a round,
    the lone client's point first."""

    def point(mix: str, clients: int, round_: int) -> Work:
        return f"{case.name} {mix} N={clients} round {round_}", lambda: point_row(
            arms, settings, mix=mix, clients=clients, round_=round_,
            alone=alone_of(rows_of(case, rows), mix),
        )  # fmt: skip

    def once(kind: str, round_: int, row: Callable[..., Row]) -> Work:
        return f"{case.name} {kind} round {round_}", lambda: row(arms, settings, round_=round_)

    works: list[Work] = []
    for round_ in range(settings.rounds):
        works += [point(mix, n, round_) for mix in settings.mixes for n in case.levels]
        if case.is_whole:
            works.append(once("long", round_, long_row))
        if round_ < case.num_prefix_rows(settings.rounds):
            works.append(once("prefix", round_, prefix_row))
    if case.is_whole:
        works.append((f"{case.name} overload", lambda: overload_row(arms, settings)))
    return works


def num_rows(case: Case, settings: Settings) -> int:
    a_round = len(settings.mixes) * len(case.levels) + case.is_whole
    once = 1 + case.is_whole + case.num_prefix_rows(settings.rounds)
    return settings.rounds * a_round + once


def play_case(
    case: Case,
    settings: Settings,
    ledger: Ledger,
    *,
    done: Callable[[str], None],
    start: Start = started,
) -> None:
    """Every row of ``case`` that is not there yet; none beyond a wrong answer."""
    if is_over(case, settings, ledger.rows):
        for row in rows_of(case, ledger.rows):
            done(row["key"])
        return
    with start(case, settings) as arms:

        def keep(key: str, measure: Callable[[], Row]) -> None:
            ledger.row(key, lambda: {"case": case.name, **measure()})
            done(key)

        keep(f"{case.name} exact", lambda: {"model": arms.model, **exact_row(arms, settings)})
        for key, measure in works_of(case, settings, arms, ledger.rows):
            if is_over(case, settings, ledger.rows):
                return
            keep(key, measure)


def rows_of(case: Case, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["case"] == case.name]


def is_over(case: Case, settings: Settings, rows: Sequence[Row]) -> bool:
    """Nothing is left to measure, or an answer was wrong and nothing is worth it."""
    mine = rows_of(case, rows)
    is_wrong = check_exact(mine).outcome == "fail" or bool(check_answers(mine))
    return is_wrong or len(mine) == num_rows(case, settings)


def verdicts_of(
    cases: Sequence[Case], settings: Settings, rows: Sequence[Row]
) -> dict[str, dict[str, Any]]:
    """By class: the verdict, what it is about, and every check of its models."""
    found: dict[str, dict[str, Any]] = {}
    for family in dict.fromkeys(case.family for case in cases):
        checks = {
            case.name: judge_case(case, rows, settings) for case in cases if case.family == family
        }
        every: list[Check] = [check for each in checks.values() for check in each]
        outcome, reason = judge_class(every)
        found[family] = {
            "verdict": outcome,
            "reason": reason,
            "checks": {name: [c.as_json() for c in each] for name, each in checks.items()},
        }
    return found


def gate(cases: Sequence[Case], settings: Settings, out: Path) -> dict[str, dict[str, Any]]:
    """Measure what is missing, then judge all of it."""
    here = commit()
    identity = {"commit": here["commit"], "settings": settings.as_json()}
    head = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **here,
        "machine": machine_facts(),
        "versions": versions(),
        "threads_a_stage": num_threads(settings),
    }
    ledger = Ledger(out / ROWS, identity, head)
    with tqdm(total=sum(num_rows(case, settings) for case in cases), unit="row") as bar:

        def done(key: str) -> None:
            bar.set_description(key)
            bar.update()

        for case in cases:
            try:
                play_case(case, settings, ledger, done=done)
            except SkippyError as problem:  # one model that does not start leaves the others
                bar.write(f"{case.name}: {problem}", file=sys.stderr)
    # Classes measured before under the same settings keep their verdict.
    names = {case.name for case in cases}
    kept = [
        case
        for case in default_cases(CLASSES, {})
        if case.name not in names and rows_of(case, ledger.rows)
    ]
    found = verdicts_of([*cases, *kept], settings, ledger.rows)
    write_json(out / VERDICTS, {
        **ledger.head, "settings": settings.as_json(), "classes": found,
    })  # fmt: skip
    return found


def show(found: dict[str, dict[str, Any]]) -> None:
    for family, entry in found.items():
        print(f"\n{family}: {entry['verdict']} ({entry['reason']})")
        for case, checks in entry["checks"].items():
            for check in checks:
                print(f"  {case} {Check(**check)}")


def _classes(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if not set(chosen) <= set(CLASSES):
        raise ValueError
    return chosen


def _model(text: str) -> tuple[str, str]:
    family, _, path = text.partition("=")
    if family not in CLASSES or not path:
        raise ValueError
    return family, path


def _levels(text: str) -> tuple[int, ...]:
    levels = tuple(int(word) for word in text.split(","))
    if not all(1 <= level <= 64 for level in levels):
        raise ValueError
    return levels


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench gate", description=__doc__)
    add = parser.add_argument
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", dest="mode", action="store_const", const=QUICK, default=QUICK,
                     help="10 s or 2N requests a point, 3 rounds, one mix (default)")  # fmt: skip
    how.add_argument("--full", dest="mode", action="store_const", const=FULL,
                     help="60 s or 5N requests a point, 5 rounds, eight mixes; days")  # fmt: skip
    add("--classes", type=_classes, default=CLASSES, metavar="C,C..", help=", ".join(CLASSES))
    add("--model", type=_model, action="append", default=[], metavar="CLASS=FILE",
        help="in place of the class's fixture")  # fmt: skip
    add("--levels", type=_levels, metavar="N,N..", help="clients; leaving some out decides nothing")
    add("--rounds", type=int, help="below 3 decides nothing")
    add("--point-seconds", type=float, metavar="S")
    add("--stages", type=int, default=QUICK.stages, help="of both engines (%(default)s)")
    add("--threads", type=int, help="of each stage (its share of the cores)")
    add("--out", type=Path, default=HERE, metavar="DIR", help="of rows.jsonl and verdicts.json")
    add("--fresh", action="store_true", help="forget the rows that are there")
    return parser


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    changes = {"stages": args.stages, "threads": args.threads, "rounds": args.rounds,
               "point_seconds": args.point_seconds}  # fmt: skip
    settings = replace(args.mode, **{k: v for k, v in changes.items() if v is not None})
    cases = default_cases(args.classes, dict(args.model))
    if args.levels:
        cases = [replace(case, levels=args.levels) for case in cases]
    if args.fresh:
        set_aside(args.out / ROWS)
    missing = [path for _, path in args.model if not Path(path).is_file()]
    if missing:
        raise UsageError(f"no model file at {missing[0]}")
    found = gate(cases, settings, args.out)
    show(found)
    print(f"written to {args.out / VERDICTS}")
    return 0
