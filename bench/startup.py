"""What loading costs, and the self-test's part of it: ``python -m bench stage --load MODEL``.

Some settings are read once per process, so each load is a child process. There are two pairs of
starts, and in each pair the second lacks only the self-test, so the difference is what that adds to
the time until a stage is loaded. A first start finds nothing in the cache: it reads the whole file
for its digest, probes the library and cuts the slice. A later one finds all of that.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.machine import commit, machine_facts
from skippy_mesh.config import ContextConfig, specs_of
from stages.gguf_file import ModelFile

ARMS = {"one stage": 1, "last of two": 2}
STARTS = ("first", "first, no test", "later", "later, no test")
_CHILD_TIMEOUT_S = 900


def compare(model: ModelFile, rounds: int, threads: int, *, cold: bool) -> dict[str, object]:
    """Each arm and kind of start, a line each at the end. ``cold`` reads every file from disk."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (arm, start): [] for arm in ARMS for start in STARTS
    }
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for arm in list(ARMS)[:: -1 if number % 2 else 1]:
                cache = Path(folder) / arm
                # Who comes first changes; a later start needs one before it.
                for start in (STARTS[k] for k in ((1, 0, 3, 2) if number % 2 else (0, 1, 2, 3))):
                    gone = cache if start.startswith("first") else cache / "selftest"
                    shutil.rmtree(gone, ignore_errors=True)
                    if cold:
                        evict([*map(Path, model.paths), *cache.rglob("*.gguf")])
                    found[arm, start].append(_child(model, arm, start, threads, cache))
    print(f"{model.paths[0].name}: {threads} threads, {rounds} rounds; medians (low to high)")
    print(f"{'':>12} {'':>14} {'load s':>22} {'waited for the test s':>22}")
    points = [_point(arm, start, loads) for (arm, start), loads in found.items()]
    for point in points:
        print(f"{point['arm']:>12} {point['start']:>14} {_shown(point['load_s']):>22} "
              f"{_shown(point['waited_s']):>22}")  # fmt: skip
    added = [
        _added(arm, start, found[arm, start], found[arm, f"{start}, no test"])
        for arm in ARMS
        for start in ("first", "later")
    ]
    for row in added:
        print(f"{row['arm']:>12} {row['start']:>14}: the test adds {_shown(row['added_s'])} s, "
              f"{_shown(row['share'], '.1%')} of the load")  # fmt: skip
    return {
        "machine": machine_facts(), "commit": commit(), "cold": cold, "points": points,
        "added": added,
    }  # fmt: skip


def evict(paths: Sequence[Path]) -> None:
    """Let the system forget what it has of these files in memory."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _point(arm: str, start: str, loads: Sequence[dict[str, float]]) -> dict[str, object]:
    return {
        "arm": arm,
        "start": start,
        "load_s": _spread([load["load_s"] for load in loads]),
        "waited_s": _spread([load["self_test_s"] for load in loads]),
    }


def _added(
    arm: str, start: str, tested: Sequence[dict[str, float]], others: Sequence[dict[str, float]]
) -> dict[str, object]:
    """What the test adds to the load, round by round."""
    pairs = [(a["load_s"], b["load_s"]) for a, b in zip(tested, others, strict=True)]
    return {
        "arm": arm,
        "start": start,
        "added_s": _spread([with_test - without for with_test, without in pairs]),
        "share": _spread([1 - without / with_test for with_test, without in pairs]),
    }


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def _shown(spread: object, form: str = ".2f") -> str:
    assert isinstance(spread, tuple)
    median, low, high = (format(value, form) for value in spread)
    return f"{median} ({low} to {high})"


def _child(model: ModelFile, arm: str, start: str, threads: int, cache: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.startup", model.paths[0], arm, start, str(threads)],
        env={**os.environ, "SKIPPY_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"loading failed: {done.stderr.strip().splitlines()[-1:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def measure(path: str, arm: str, start: str, threads: int) -> dict[str, float]:
    """Load the last stage in this process: the seconds of it all, and those spent waiting for the
    test."""
    from stages import selftest
    from stages.worker import StageWorker

    if start.endswith("no test"):
        selftest.failure_of_views = lambda *_, **__: None
    num_stages = ARMS[arm]
    model = ModelFile.open(path)
    context = ContextConfig(num_cells=4096, num_lanes=4, num_threads=threads)
    cuts = [model.num_layers * k // num_stages for k in range(1, num_stages)]
    stage = StageWorker(specs_of(path, model.num_layers, cuts, context)[-1])
    info = stage.load()
    stage.close()
    if info.why_inexact is not None:
        raise RuntimeError(info.why_inexact)
    return {"load_s": info.load_s, "self_test_s": info.self_test_s}


if __name__ == "__main__":
    model_path, which, when, num_threads = sys.argv[1:]
    print(json.dumps(measure(model_path, which, when, int(num_threads))))
