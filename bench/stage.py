"""What staged execution costs: the runtime, the tap, the wire and a Ray hop, as ratios.

Everything is compared with plain ``llama_decode`` over the undivided model on the same file, in the
same process and in alternating rounds: this machine's clock drifts more than the figures.

* runtime: one stage, so embedding, checks, batch, logits copy and sampling; no cut
* tap: two stages in one process against one stage
* wire: encoding and decoding the frames of one step, no transport
* hop: what each further Ray stage adds to a step beyond the stages' own time
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from bench.machine import commit, machine_facts
from skippy_mesh.config import ContextConfig, specs_of
from skippy_mesh.messages import Remove, SamplingParams, StepBatch
from skippy_mesh.starting import demo_path
from skippy_mesh.wire import (
    Hidden,
    decode_activations,
    decode_step,
    encode_activations,
    encode_step,
)
from stages.embedding import Embedding
from stages.gguf_file import ModelFile
from stages.pipeline import LocalPipeline, RayPipeline
from stages.reference import Reference
from stages.worker import StageWorker

DEPTH = 64  # cells each sequence holds before its decode steps are timed
ROWS = (1, 4, 8, 32)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench stage", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="alternating rounds (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="steps a round (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="per stage (%(default)s)")
    parser.add_argument("--no-ray", action="store_true", help="leave out the hop")
    parser.add_argument("--families", action="store_true", help="the profile's cost instead")
    parser.add_argument("--load", action="store_true", help="what loading costs instead")
    parser.add_argument("--cold", action="store_true", help="of --load: read all files from disk")
    return run(parser.parse_args(argv))


class Steps:
    """The same steps for every arm: ``num_rows`` sequences fill up, then decode together."""

    def __init__(self, num_rows: int, num_vocab: int, *, epoch: int = 0, depth: int = DEPTH):
        self._num_rows, self._epoch, self._depth = num_rows, epoch, depth
        self._tokens = np.random.default_rng(0).integers(3, num_vocab, 4096).tolist()
        self._step_id = 0
        self._position = 0

    def prefill(self) -> list[StepBatch]:
        depth = self._position = self._depth
        return [self._batch([lane] * depth, range(depth)) for lane in range(self._num_rows)]

    def decode(self) -> StepBatch:
        position = self._position
        self._position += 1
        return self._batch(range(self._num_rows), [position] * self._num_rows)

    def _batch(self, lanes: Sequence[int], positions: Sequence[int]) -> StepBatch:
        self._step_id += 1
        last = {lane: row for row, lane in enumerate(lanes)}
        is_new = positions[0] == 0
        return StepBatch(
            epoch=self._epoch,
            step_id=self._step_id - 1,
            operations=tuple(Remove(lane) for lane in last if is_new),
            lanes=tuple(lanes),
            positions=tuple(positions),
            tokens=tuple(self._tokens[(7 * lane + at) % 4096] for lane, at in zip(
                lanes, positions, strict=True)),
            samples=tuple(last[lane] == row for row, lane in enumerate(lanes)),
            new_lanes={lane: SamplingParams() for lane in last if is_new},
        )  # fmt: skip


def timed(run: Callable[[StepBatch], object], batch: StepBatch) -> float:
    started = time.perf_counter()
    run(batch)
    return time.perf_counter() - started


class Arm:
    """One way to run a step; ``seconds`` holds a list of step times per round."""

    def __init__(self, name: str, measure: Callable[[StepBatch], float], steps: Steps):
        self.name = name
        self._measure = measure
        self._steps = steps
        self.seconds: list[list[float]] = []
        for batch in steps.prefill():
            measure(batch)

    def round(self, num_steps: int) -> None:
        self.seconds.append([self._measure(self._steps.decode()) for _ in range(num_steps)])

    def over(self, other: Arm) -> dict[str, float]:
        """Median and spread, over rounds, of this arm's median step over ``other``'s."""
        ratios = [
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(self.seconds, other.seconds, strict=True)
        ]
        return {
            "ratio": round(statistics.median(ratios), 4),
            "low": round(min(ratios), 4),
            "high": round(max(ratios), 4),
        }


def measure_local(model: ModelFile, args: argparse.Namespace, num_rows: int) -> dict[str, object]:
    """Plain, one stage and two stages at ``num_rows``, side by side."""
    context = ContextConfig(
        num_cells=max(1024, 2 * num_rows * (DEPTH + args.rounds * args.steps)),
        num_lanes=num_rows, num_threads=args.threads,
    )  # fmt: skip
    with ExitStack() as stack:
        plain = Reference(model.paths[0], context)
        stack.callback(plain.close)
        path, num_layers = model.paths[0], model.num_layers
        workers = [StageWorker(spec) for spec in specs_of(path, num_layers, (), context)]
        one = LocalPipeline(workers)
        stack.callback(one.close)
        halves = specs_of(path, num_layers, (num_layers // 2,), context)
        two = LocalPipeline([StageWorker(spec) for spec in halves])
        stack.callback(two.close)
        arms = [
            Arm("plain", plain.decode, Steps(num_rows, model.num_vocab)),
            Arm("one stage", lambda b: timed(one.forward, b), Steps(num_rows, model.num_vocab)),
            Arm("two stages", lambda b: timed(two.forward, b), Steps(num_rows, model.num_vocab)),
        ]
        native_before, total = workers[0].times().native_s, 0.0
        for _ in range(args.rounds):
            for arm in arms:
                arm.round(args.steps)
        native = workers[0].times().native_s - native_before
        total = sum(sum(times) for times in arms[1].seconds)
    return {
        "rows": num_rows,
        "plain_step_ms": round(1e3 * statistics.median(itertools.chain(*arms[0].seconds)), 3),
        # The part of the runtime's own steps outside llama_decode: free of the clock's drift.
        "runtime_share_outside_llama_decode": round(1 - native / total, 5),
        "one_stage_over_plain": arms[1].over(arms[0]),
        "two_stages_over_one": arms[2].over(arms[1]),
    }


def measure_parts(model: ModelFile, num_rows: int, step_ms: float) -> dict[str, object]:
    """The embedding and the wire alone, as a share of the plain step at the same rows."""
    embedding = Embedding(model)
    batch = Steps(num_rows, model.num_vocab).decode()
    hidden = embedding(batch.tokens)

    def wire() -> None:
        decode_step(encode_step(batch))
        decode_activations(encode_activations(0, 0, Hidden(hidden)))

    return {
        "embedding_share": round(_milliseconds(lambda: embedding(batch.tokens)) / step_ms, 5),
        "wire_share": round(_milliseconds(wire) / step_ms, 5),
    }


def _milliseconds(run: Callable[[], object], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def measure_hops(model: ModelFile, args: argparse.Namespace) -> dict[str, object]:
    """Milliseconds a step spends outside its stages, for 1, 2 and 3 Ray stages at one row."""
    from coordinator.launch import ray_cluster, stage_actors

    context = ContextConfig(num_cells=1024, num_lanes=1, num_threads=args.threads)
    outside: dict[int, list[float]] = {}
    with ray_cluster(address=None, num_cpus=3 * args.threads, namespace="bench"):
        for num_stages in (1, 2, 3):
            cuts = [model.num_layers * k // num_stages for k in range(1, num_stages)]
            specs = specs_of(model.paths[0], model.num_layers, cuts, context)
            with stage_actors(specs, mesh_name="bench") as (actors, infos):
                pipeline = RayPipeline(actors, infos)
                outside[num_stages] = _outside_ms(pipeline, model, args)
    medians = {count: statistics.median(times) for count, times in outside.items()}
    per_hop = [outside[3][k] - outside[2][k] for k in range(args.rounds)]
    return {
        "outside_stages_ms": {str(count): round(value, 3) for count, value in medians.items()},
        "hop_ms_third_stage": round(statistics.median(per_hop), 3),
        "hop_ms_second_stage": round(medians[2] - medians[1], 3),
    }


def _outside_ms(pipeline: RayPipeline, model: ModelFile, args: argparse.Namespace) -> list[float]:
    """Per round, a step's milliseconds less the time inside its stages."""
    steps = Steps(1, model.num_vocab)
    for batch in steps.prefill():
        pipeline.forward(batch)
    found = []
    for _ in range(args.rounds):
        before = pipeline.busy_seconds()
        total = sum(timed(pipeline.forward, steps.decode()) for _ in range(args.steps))
        found.append(1e3 * (total - (pipeline.busy_seconds() - before)) / args.steps)
    return found


def run(args: argparse.Namespace) -> int:
    if args.families:
        from bench.families import compare

        print(json.dumps(compare(args.rounds, args.steps, args.threads)))
        return 0
    model = ModelFile.open(demo_path() if args.model == "demo" else args.model)
    if args.load:
        from bench.startup import compare as compare_loads

        print(json.dumps(compare_loads(model, args.rounds, args.threads, cold=args.cold)))
        return 0
    print(f"{model.paths[0].name}: {args.threads} threads, depth {DEPTH}, "
          f"{args.rounds} rounds of {args.steps} steps")  # fmt: skip
    print(f"{'rows':>5} {'plain ms':>9} {'host share':>11} {'1 stage/plain':>14} "
          f"{'2 stages/1':>11} {'embedding':>10} {'wire':>8}")  # fmt: skip
    points = []
    for num_rows in ROWS:
        point = measure_local(model, args, num_rows)
        point |= measure_parts(model, num_rows, float(str(point["plain_step_ms"])))
        points.append(point)
        one, two = point["one_stage_over_plain"], point["two_stages_over_one"]
        assert isinstance(one, dict) and isinstance(two, dict)
        print(f"{num_rows:>5} {point['plain_step_ms']:>9} "
              f"{point['runtime_share_outside_llama_decode']:>11.2%} {one['ratio']:>14.3f} "
              f"{two['ratio']:>11.3f} {point['embedding_share']:>10.3%} "
              f"{point['wire_share']:>8.3%}", flush=True)  # fmt: skip
    hops = None if args.no_ray else measure_hops(model, args)
    if hops:
        print(f"Ray, one row: {hops['outside_stages_ms']} ms outside 1, 2, 3 stages; "
              f"a further hop costs {hops['hop_ms_third_stage']} ms")  # fmt: skip
    document = {"machine": machine_facts(), "commit": commit(), "points": points, "hops": hops}
    print(json.dumps(document))
    return 0
