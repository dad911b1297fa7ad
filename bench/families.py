"""What the exactness profile costs: ``python -m bench stage --families``.

The profile against the same library left alone, as ratios of step times. Some settings are read
once per process, so each arm is a child process; the arms alternate, round by round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.machine import commit, machine_facts
from skippy_mesh.config import ContextConfig, specs_of

ROWS = (1, 4, 8, 32)
FAMILIES = ("dense", "mla", "window", "ssm", "linear")
TYPES = ("q8_0", "q4_K_M")
MORE = (("dense", "q6_K"), ("dense", "f16"))
_CHUNK = 256
_CHILD_TIMEOUT_S = 300


def compare(rounds: int, steps: int, threads: int) -> dict[str, object]:
    """Every family and type, a line each as it goes."""
    from tests.models import make_model

    print(f"{'family':>8} {'type':>7} {'profile':>24} " + " ".join(
        f"{column:>9}" for column in ("prefill", *(f"{rows} rows" for rows in ROWS))
    ))  # fmt: skip
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for family, weight_type in _cases():
            path = make_model(family, Path(folder) / "model.gguf", dtype=weight_type, size="bench")
            arms: dict[str, list[dict[str, float]]] = {"exact": [], "off": []}
            profile = ""
            for number in range(rounds):
                for arm in list(arms)[:: 1 if number % 2 else -1]:
                    found = _child(path, arm, steps, threads)
                    arms[arm].append(found["ms"])
                    profile = found["profile"] if arm == "exact" else profile
            ratios = {
                column: round(statistics.median(
                    exact[column] / off[column]
                    for exact, off in zip(arms["exact"], arms["off"], strict=True)
                ), 3)
                for column in arms["off"][0]
            }  # fmt: skip
            points.append({"family": family, "type": weight_type, "profile": profile, "x": ratios})
            print(f"{family:>8} {weight_type:>7} {profile:>24} " + " ".join(
                f"{ratio:>9.2f}" for ratio in ratios.values()), flush=True)  # fmt: skip
            path.unlink()
    return {"machine": machine_facts(), "commit": commit(), "exact_over_off": points}


def _cases() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        for weight_type in TYPES:
            yield family, weight_type
    yield from MORE


def _child(path: Path, arm: str, steps: int, threads: int) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "bench.families", str(path), arm, str(steps), str(threads)],
        capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{path.name} {arm} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(path: str, arm: str, steps: int, threads: int) -> dict[str, object]:
    """One arm in this process: median milliseconds of a prefill chunk and of decode steps."""
    from bench.stage import Steps, timed
    from stages.gguf_file import ModelFile
    from stages.pipeline import LocalPipeline
    from stages.worker import StageWorker

    model = ModelFile.open(path)
    context = ContextConfig(
        num_cells=16384, num_lanes=max(ROWS), num_threads=threads, exact=arm == "exact"
    )
    specs = specs_of(model.paths[0], model.num_layers, (), context)
    pipeline = LocalPipeline([StageWorker(spec) for spec in specs])
    profile = pipeline.infos[0].profile
    milliseconds: dict[str, float] = {}
    for column, rows, depth in (("prefill", 1, _CHUNK), *((f"{n} rows", n, 64) for n in ROWS)):
        plan = Steps(rows, model.num_vocab, epoch=len(milliseconds), depth=depth)
        fill = [timed(pipeline.forward, batch) for batch in plan.prefill()]
        times = fill if column == "prefill" else [
            timed(pipeline.forward, plan.decode()) for _ in range(steps)
        ]  # fmt: skip
        milliseconds[column] = 1e3 * statistics.median(times)
    pipeline.close()
    text = f"pad {profile.pad}, tiled {'on' if profile.tiled else 'off'}"
    return {"ms": milliseconds, "profile": text}


if __name__ == "__main__":
    model_path, which, num_steps, num_threads = sys.argv[1:]
    print(json.dumps(measure(model_path, which, int(num_steps), int(num_threads))))
