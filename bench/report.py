"""The gate's rows as pictures, a page and a table: ``python -m bench report``.

Writes a PNG for each block and one HTML file that holds them all, and puts the table into the
README between its marks. A block that is missing for a class fails the run.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.blocks import Block, blocks_of, class_of, median_of, missing, points_of
from bench.gate.rules import Check, judge_class
from bench.gate.settings import CROWD
from bench.ledger import read_rows
from bench.points import RESULTS
from skippy_mesh.errors import SkippyError, UsageError

GATE = Path(__file__).parent / "gate"
README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- the gate's table begins -->", "<!-- the gate's table ends -->"
_STYLE = (
    "body{font-family:sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.3rem .6rem;"
    "text-align:left}img{max-width:100%}.fail{color:#b00}.pass{color:#070}"
)
_COLUMNS = (
    "class", "verdict", "tok/s with 1", f"tok/s with {CROWD}", f"p99 with {CROWD}, s",
    "KV kB a session", "first token, warm over cold", "about",
)  # fmt: skip


def table_of(verdicts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each model: new engine / single lane, medians over the rounds. What is said of it
    is its own; a class's verdict is that of its worst model."""
    lines = []
    for entry in verdicts["classes"].values():
        for case, found in entry["checks"].items():
            outcome, reason = judge_class([Check(**check) for check in found])
            points = points_of(rows, case)
            crowd = [row for row in points if row["clients"] == CROWD]
            prefix = [r for r in rows if r["case"] == case and r["kind"] == "prefix"]
            warm, cold = (median_of(prefix, f"{arm}.p50_ttft_ms") for arm in ("warm", "cold"))
            lines.append([
                case,
                f"**{outcome}**",
                _pair([row for row in points if row["clients"] == 1], "output_throughput", 1.0),
                _pair(crowd, "output_throughput", 1.0),
                _pair(crowd, "p99_e2el_ms", 1e-3),
                _pair(crowd, "kv_bytes_per_session", 1e-3),
                f"{warm / cold:.2f}" if warm and cold else "",
                without_mix(reason, verdicts["settings"]["mixes"]),
            ])  # fmt: skip
    return lines


def without_mix(text: str, mixes: Sequence[str]) -> str:
    """The name of the only mix is in the line above the table."""
    return text.removeprefix(f"{mixes[0]} ") if len(mixes) == 1 else text


def _pair(rows: Sequence[Mapping[str, Any]], key: str, scale: float) -> str:
    found = [median_of(rows, f"{arm}.{key}") for arm in ("ours", "theirs")]
    return " / ".join("-" if value is None else f"{value * scale:.1f}" for value in found)


def where(head: Mapping[str, Any]) -> str:
    """Date, commit and machine in a line."""
    machine, settings = head["machine"], head["settings"]
    state = ", with changes" if head.get("dirty") else ""
    return (
        f"{head['date'][:10]}, commit {str(head['commit'])[:7]}{state}, "
        f"{machine['cores']} cores ({machine['cpu']}), "
        f"`bench gate --{settings['mode']}`: {settings['stages']} stages of "
        f"{head['threads_a_stage']} thread, {settings['rounds']} paired rounds, "
        f"{' '.join(settings['mixes'])}; new engine / single lane, medians"
    )


def markdown(head: Mapping[str, Any], lines: Sequence[Sequence[str]]) -> str:
    rule = "|".join(["---"] * len(_COLUMNS))
    table = [f"| {' | '.join(_COLUMNS)} |", f"|{rule}|"]
    table += [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([f"{where(head)}:", "", *table])


def put_into(text: str, table: str) -> str:
    """The README with ``table`` between its marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UsageError(f"the README does not hold the marks {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def page_of(
    head: Mapping[str, Any],
    lines: Sequence[Sequence[str]],
    pictures: Sequence[tuple[Block, bytes]],
    peers: Mapping[str, Any],
) -> str:
    """One file that needs no other."""
    body = [f"<h1>skippy_mesh: the gate</h1><p>{html.escape(where(head))}</p>"]
    body.append(_html_table(_COLUMNS, [[c.replace("**", "") for c in line] for line in lines]))
    for block, png in pictures:
        data = base64.b64encode(png).decode()
        body.append(
            f"<h2>{html.escape(block.title)}</h2><p>{html.escape(block.note)}</p>"
            f'<img alt="{html.escape(block.title)}" src="data:image/png;base64,{data}">'
        )
    body.append("<h2>Checks</h2>")
    for entry in head["classes"].values():
        for case, checks in entry["checks"].items():
            body.append(f"<h3>{html.escape(case)}</h3>")
            body.append(
                _html_table(("outcome", "check", "found"),
                            [[c["outcome"], c["name"], c["detail"]] for c in checks])
            )  # fmt: skip
    for name, ratios in peers.items():
        body.append(f"<h2>Beside peers: {html.escape(name)}, ours over theirs</h2>")
        body.append(_html_table(("point", "metric", "median", "low", "high", "rounds"), ratios))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>skippy_mesh: the gate</title>'
        f"<style>{_STYLE}</style>{''.join(body)}</html>\n"
    )


def _html_table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    header = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = [
        "".join(f'<td class="{cell}">{html.escape(str(cell))}</td>'
                if cell in ("pass", "fail") else f"<td>{html.escape(str(cell))}</td>"
                for cell in line)
        for line in lines
    ]  # fmt: skip
    return f"<table><tr>{header}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def peers_of(folder: Path) -> dict[str, list[list[object]]]:
    """The ratios of every document of results that has some."""
    found: dict[str, list[list[object]]] = {}
    for path in sorted(folder.glob("*.json")):
        ratios = json.loads(path.read_text()).get("ratios") or {}
        lines: list[list[object]] = [
            [point, metric, i["median"], i["low"], i["high"], i["rounds"]]
            for point, each in ratios.items()
            for metric, i in each.items()
            if isinstance(i, dict)
        ]
        if lines:
            found[path.stem] = lines
    return found


def report(gate: Path, out: Path, readme: Path | None) -> None:
    try:
        head = json.loads((gate / "verdicts.json").read_text())
        _, rows = read_rows(gate / "rows.jsonl")
    except OSError as error:
        raise UsageError(f"no gate was run: {error.filename} is not there") from error
    # A class that was wrong has no speed to show.
    judged = [
        name for name in head["classes"]
        if any(class_of(row["case"]) == name and row["kind"] == "point" for row in rows)
    ]  # fmt: skip
    blocks = blocks_of(rows)
    if holes := missing(blocks, judged or head["classes"]):
        raise SkippyError(f"the report lacks {', '.join(holes)}: run `python -m bench gate` again")
    from bench.plots import draw

    out.mkdir(parents=True, exist_ok=True)
    pictures = []
    for block in blocks:
        draw(block, path := out / f"{block.name}.png")
        pictures.append((block, path.read_bytes()))
    lines = table_of(head, rows)
    (out / "report.html").write_text(page_of(head, lines, pictures, peers_of(RESULTS)))
    if readme:
        readme.write_text(put_into(readme.read_text(), markdown(head, lines)))
    print(f"written to {out / 'report.html'}" + (f" and {readme}" if readme else ""))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("--gate", type=Path, default=GATE, metavar="DIR", help="a gate's results")
    parser.add_argument("--out", type=Path, help="a folder (default: report/ beside them)")
    parser.add_argument("--no-readme", action="store_true", help="leave the README as it is")
    args = parser.parse_args(argv)
    report(args.gate, args.out or args.gate / "report", None if args.no_readme else README)
    return 0
