"""From the rows of a gate to its verdicts. Pure.

A check passes or fails only if the whole interval over the paired rounds says so; else it is
undecided. A class fails with one check, and passes only with all of them. Answers come first: of an
engine that is wrong no speed is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bench.gate.settings import LEVELS, Case, Margins, Settings
from bench.verdict import Interval, Target, interval, paired_ratios, verdict
from skippy_mesh.verdicts import Outcome

MIN_ROUNDS = 3
_WORST_FIRST: tuple[Outcome, ...] = ("fail", "undecided")
Row = Mapping[str, Any]
_OUTCOMES: Mapping[str, Outcome] = {
    "met": "pass",
    "missed": "fail",
    "undecided": "undecided",
    "no number": "undecided",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``void``: the row cannot say anything of this, and nothing is held against it."""

    name: str
    outcome: Outcome | Literal["void"]
    detail: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.outcome:>9}: {self.name}: {self.detail}"


def judge_case(case: Case, rows: Iterable[Row], settings: Settings) -> list[Check]:
    """Every check this case owes, those whose rows are missing undecided. If an answer was wrong
    anywhere, that is all there is to say."""
    mine = [row for row in rows if row["case"] == case.name]
    exact = check_exact(mine)
    wrong = [exact] if exact.outcome == "fail" else check_answers(mine)
    if wrong:
        return wrong
    margins, found = settings.margins, [exact]
    for mix in settings.mixes:
        for level in LEVELS if case.is_whole else case.levels:
            points = _of_kind(mine, "point", mix=mix, clients=level)
            found += check_level(f"{mix} N={level}", level, points, margins)
    if case.is_whole:
        found.append(check_long(_of_kind(mine, "long"), margins))
        found += check_prefix(_of_kind(mine, "prefix"), margins, owes_win=not case.is_recurrent)
        found += check_overload(_of_kind(mine, "overload"), margins)
    return found


def judge_class(checks: Sequence[Check]) -> tuple[Outcome, str]:
    """The verdict and what it is about: what failed, or what is undecided."""
    for outcome in _WORST_FIRST:
        found = [check for check in checks if check.outcome == outcome]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return outcome, f"{found[0].name}: {found[0].detail}{more}"
    return "pass", f"{len(checks)} checks"


def _of_kind(rows: Sequence[Row], kind: str, **fields: object) -> list[Row]:
    wanted = {"kind": kind, **fields}
    return [row for row in rows if wanted.items() <= row.items()]


def check_exact(rows: Sequence[Row]) -> Check:
    name = "same answers alone, in a crowd, and from the old engine"
    found = _of_kind(rows, "exact")
    if not found:
        return Check(name=name, outcome="undecided", detail="not measured")
    counts = {side: found[0][side] for side in ("crowd", "baseline")}
    detail = ", ".join(f"{side} {c['equal']} of {c['asked']}" for side, c in counts.items())
    is_right = all(c["equal"] == c["asked"] for c in counts.values())
    return Check(name=name, outcome="pass" if is_right else "fail", detail=detail)


def check_answers(rows: Sequence[Row]) -> list[Check]:
    """The measured answers, too: a failure for each row in which one was wrong or missing."""
    found = []
    for row in rows:
        problem = row.get("wrong")
        if problem:
            found.append(Check(name=f"answers of {row['key']}", outcome="fail", detail=problem))
    return found


def check_level(name: str, level: int, rows: Sequence[Row], margins: Margins) -> list[Check]:
    """Throughput and goodput at every N, the win and the slowest answers at N=32, and bytes."""
    if not rows:
        return [Check(name=name, outcome="undecided", detail="not measured")]
    ours, theirs = [row["ours"] for row in rows], [row["theirs"] for row in rows]
    failed = [point["void"] for point in ours if point["void"]]
    if failed:
        return [Check(name=f"{name} requests", outcome="fail", detail=failed[0])]
    ratios = {key: interval(values) for key, values in paired_ratios(ours, theirs).items()}
    floor = margins.crowd_throughput if level == margins.crowd else 1 - margins.slack
    found = [_check(f"{name} throughput", ratios["throughput"], floor)]
    if level == margins.crowd:
        found.append(_check(f"{name} p99", ratios["p99_e2e"], margins.crowd_p99, is_floor=False))
    if level == 1:
        found.append(check_first_token(f"{name} first token", ours, theirs, margins))
    found.append(check_goodput(f"{name} goodput", ours, theirs, margins))
    found.append(check_bytes(f"{name} KV bytes a session", ours, theirs, margins))
    return found


def check_goodput(name: str, ours: Sequence[Row], theirs: Sequence[Row], margins: Margins) -> Check:
    """Goodput may be 0 on a side, so what is judged is the difference over the larger one."""
    if all((point.get("attainment") or 0) < margins.void_attainment for point in (*ours, *theirs)):
        detail = f"both attain under {margins.void_attainment:.0%}"
        return Check(name=name, outcome="void", detail=detail)
    gains = []
    for one, other in zip(ours, theirs, strict=True):
        mine, yours = one.get("request_goodput"), other.get("request_goodput")
        if mine is not None and yours is not None and max(mine, yours) > 0:
            gains.append((mine - yours) / max(mine, yours))
    return _check(name, interval(gains), -margins.slack)


def check_bytes(name: str, ours: Sequence[Row], theirs: Sequence[Row], margins: Margins) -> Check:
    ratios = [
        mine / yours
        for one, other in zip(ours, theirs, strict=True)
        if (mine := one.get("kv_bytes_per_session")) and (yours := other["kv_bytes_per_session"])
    ]
    return _check(name, interval(ratios), 1 + margins.slack, is_floor=False)


def check_long(rows: Sequence[Row], margins: Margins) -> Check:
    name = "N=1 first token behind a long prompt"
    failed = [row["ours"]["void"] for row in rows if row["ours"]["void"]]
    if failed:
        return Check(name=name, outcome="fail", detail=failed[0])
    ours, theirs = [row["ours"] for row in rows], [row["theirs"] for row in rows]
    return check_first_token(name, ours, theirs, margins)


def check_first_token(
    name: str, ours: Sequence[Row], theirs: Sequence[Row], margins: Margins
) -> Check:
    """Apart from the way of a request through the actors, which the old engine, all in one process
    but for its stages, does not go: a few milliseconds, the same before a tiny model and a huge
    one."""
    fixed_ms = 1e3 * margins.request_s
    ratios = [
        max(mine - fixed_ms, 0.0) / yours
        for one, other in zip(ours, theirs, strict=True)
        if (mine := one.get("p50_ttft_ms")) is not None and (yours := other.get("p50_ttft_ms"))
    ]
    check = _check(name, interval(ratios), 1 + margins.slack, is_floor=False)
    plain = interval(paired_ratios(ours, theirs)["p50_ttft"])
    return replace(check, detail=f"{check.detail}, less {fixed_ms:.0f} ms; {plain} as it is")


def check_prefix(rows: Sequence[Row], margins: Margins, *, owes_win: bool) -> list[Check]:
    name = "shared prefix, warm over cold, first token"
    failed = [row[arm]["void"] for row in rows for arm in ("warm", "cold") if row[arm]["void"]]
    if failed:
        return [Check(name=name, outcome="fail", detail=failed[0])]
    rates = [row["warm"].get("prefix_hit_rate") or 0.0 for row in rows]
    ratios = paired_ratios([row["warm"] for row in rows], [row["cold"] for row in rows])
    found = interval(ratios["p50_ttft"])
    if not owes_win:
        told = f"{found}, hit rate {min(rates, default=0):.2f}; this class owes no win"
        return [Check(name=name, outcome="void", detail=told)]
    checks = [_check(name, found, margins.prefix_ttft, is_floor=False)]
    if rates and min(rates) < margins.prefix_hit_rate:
        detail = f"{min(rates):.2f}, wanted {margins.prefix_hit_rate:.2f} or more"
        checks.append(Check(name="shared prefix, hit rate", outcome="fail", detail=detail))
    return checks


def check_overload(rows: Sequence[Row], margins: Margins) -> list[Check]:
    if not rows:
        return [Check(name="overload", outcome="undecided", detail="not measured")]
    row = rows[0]
    told = f"{row['completed']} answered, {row['rejected']} told to come back of {row['sent']}"
    faults = []
    if row["others"]:
        faults.append(f"neither 200 nor 429: {row['others']}")
    if row["without_retry_after"]:
        faults.append(f"{row['without_retry_after']} refusals without Retry-After")
    if row["failed_decodes"]:
        faults.append(f"{row['failed_decodes']:.0f} decodes failed")
    if row["left_cells"]:
        faults.append(f"{row['left_cells']:.0f} cells were not given back")
    first, second = row["peak_bytes"]
    if first and second and second > first * margins.flat_memory:
        faults.append(f"memory grew from {first / 1e6:.0f} to {second / 1e6:.0f} MB")
    if faults:
        return [Check(name="overload", outcome="fail", detail="; ".join(faults))]
    if not row["rejected"]:  # it was no overload
        return [Check(name="overload", outcome="undecided", detail=f"nobody was refused: {told}")]
    return [Check(name="overload", outcome="pass", detail=told)]


def _check(name: str, found: Interval | None, bound: float, *, is_floor: bool = True) -> Check:
    target = Target(pair="mesh/baseline", clients=0, metric=name, bound=bound, is_floor=is_floor)
    said = verdict(target, found, min_rounds=MIN_ROUNDS)
    sign = "at least" if is_floor else "at most"
    shown = "no number" if found is None else str(found)
    return Check(name=name, outcome=_OUTCOMES[said], detail=f"{shown}, {sign} {bound:g}")
