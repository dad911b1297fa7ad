"""What loading costs, and the self-test's part of it: ``python -m bench stage --load MODEL``.

Some settings are read once per process, so each load is a child process. Every round has a cache
of its own: a first start, which reads the whole file for its digest, probes the library and cuts
the slice, and then a start that finds all of that and lacks only the verdict.
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
STARTS = ("first start", "no verdict")
_CHILD_TIMEOUT_S = 900


def compare(model: ModelFile, rounds: int, threads: int, *, cold: bool) -> dict[str, object]:
    """Each arm and kind of start, a line each at the end. ``cold`` reads every file from disk."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (arm, start): [] for arm in ARMS for start in STARTS
    }
    for number in range(rounds):
        for arm in list(ARMS)[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as cache:
                for start in STARTS:
                    if cold:
                        evict([*map(Path, model.paths), *Path(cache).rglob("*.gguf")])
                    found[arm, start].append(_child(model, ARMS[arm], threads, cache))
                    shutil.rmtree(Path(cache) / "selftest")
    print(f"{model.paths[0].name}: {threads} threads, {rounds} rounds; median (low to high)")
    print(f"{'':>12} {'':>12} {'load s':>8} {'self-test s':>12} {'share':>22}")
    points = [_point(arm, start, loads) for (arm, start), loads in found.items()]
    for point in points:
        low, high = point["share_low"], point["share_high"]
        print(f"{point['arm']:>12} {point['start']:>12} {point['load_s']:>8.2f} "
              f"{point['self_test_s']:>12.3f} {point['share']:>7.1%} "
              f"({low:.1%} to {high:.1%})")  # fmt: skip
    return {"machine": machine_facts(), "commit": commit(), "cold": cold, "points": points}


def evict(paths: Sequence[Path]) -> None:
    """Let the system forget what it has of these files in memory."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _point(arm: str, start: str, loads: Sequence[dict[str, float]]) -> dict[str, object]:
    shares = [load["self_test_s"] / load["load_s"] for load in loads]
    return {
        "arm": arm,
        "start": start,
        "load_s": statistics.median(load["load_s"] for load in loads),
        "self_test_s": statistics.median(load["self_test_s"] for load in loads),
        "share": statistics.median(shares),
        "share_low": min(shares),
        "share_high": max(shares),
    }


def _child(model: ModelFile, num_stages: int, threads: int, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.startup", model.paths[0], str(num_stages), str(threads)],
        env={**os.environ, "SKIPPY_CACHE_DIR": cache},
        capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"loading failed: {done.stderr.strip().splitlines()[-1:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def measure(path: str, num_stages: int, threads: int) -> dict[str, float]:
    """Load the last of ``num_stages`` in this process: the seconds of it all and of the proof."""
    from stages.worker import StageWorker

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
    model_path, stages, num_threads = sys.argv[1:]
    print(json.dumps(measure(model_path, int(stages), int(num_threads))))
