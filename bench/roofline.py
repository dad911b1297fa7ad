"""What the machine allows: the same work without a server, a scheduler or a client.

Every session's prompt, then all their tokens row by row in full batches, all there from the start:
by our own runtime (one stage with its profile and sampler, stepped in a bare loop) and by
llama.cpp's ``llama-batched-bench``. No server can be faster than its own runtime is here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.servers import llama_flags
from skippy_mesh.errors import RuntimeUnavailableError

RUNTIME, BATCHED_BENCH = "our runtime", "llama-batched-bench"
_MAX_ROWS = 512
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """``num_sessions`` sessions of so many tokens in and out, in a pool of ``num_cells``."""

    num_sessions: int
    prompt_tokens: int
    output_tokens: int
    num_cells: int
    num_threads: int


def point_of(work: Work, prefill_s: float, decode_s: float) -> dict[str, object]:
    """Tokens a second are over all of the work, as a server's makespan counts them."""
    return {
        "output_throughput": work.num_sessions * work.output_tokens / (prefill_s + decode_s),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
    }


def of_batched_bench(program: Path, model: Path, work: Work) -> dict[str, object]:
    command = [
        str(program), *llama_flags(model, num_cells=work.num_cells, num_threads=work.num_threads),
        "--kv-unified", "-b", str(_MAX_ROWS), "-ub", str(_MAX_ROWS),
        "-npp", str(work.prompt_tokens), "-ntg", str(work.output_tokens),
        "-npl", str(work.num_sessions), "--output-format", "jsonl",
    ]  # fmt: skip
    return point_of(work, *read_batched_bench(_output_of(command)))


def read_batched_bench(text: str) -> tuple[float, float]:
    """Seconds for all prompts and for all tokens after them."""
    for line in text.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            return float(entry["t_pp"]), float(entry["t_tg"])
    raise RuntimeUnavailableError(f"llama-batched-bench told no times: {text[-200:]!r}")


def of_our_runtime(model: Path, work: Work) -> dict[str, object]:
    """In a process of its own: some of the profile's settings are read once per process."""
    command = [sys.executable, "-m", "bench.roofline", str(model), json.dumps(asdict(work))]
    prefill_s, decode_s = json.loads(_output_of(command).splitlines()[-1])
    return point_of(work, prefill_s, decode_s)


def _output_of(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        tail = done.stderr.strip()[-400:]
        raise RuntimeUnavailableError(f"{Path(command[0]).name} failed ({done.returncode}): {tail}")
    return done.stdout


def chunks_of(work: Work, *, max_rows: int, is_mixed: bool) -> Iterator[list[tuple[int, int, int]]]:
    """(session, start, end) of each prefill step: prompts back to back, as full as a step may be,
    or a chunk of one prompt a step where the memory is recurrent."""
    step: list[tuple[int, int, int]] = []
    room = max_rows
    for session in range(work.num_sessions):
        start = 0
        while start < work.prompt_tokens:
            end = min(work.prompt_tokens, start + room)
            step.append((session, start, end))
            room -= end - start
            start = end
            if room == 0 or not is_mixed:
                yield step
                step, room = [], max_rows
    if step:
        yield step


def measure(model_path: Path, work: Work) -> tuple[float, float]:
    """Seconds for the prompts and for the rest, in this process."""
    import numpy as np

    from skippy_mesh.config import ContextConfig, specs_of
    from skippy_mesh.messages import SamplingParams, StepBatch
    from stages.gguf_file import ModelFile
    from stages.pipeline import LocalPipeline
    from stages.worker import StageWorker

    model = ModelFile.open(model_path)
    context = ContextConfig(
        num_cells=work.num_cells, num_lanes=work.num_sessions, num_threads=work.num_threads
    )
    specs = specs_of(model_path, model.num_layers, (), context)
    pipeline = LocalPipeline([StageWorker(spec) for spec in specs])
    tokens = np.random.default_rng(0).integers(3, model.num_vocab, 4096).tolist()
    greedy = SamplingParams(temperature=0.0)
    step_id = 0

    def step(parts: Sequence[tuple[int, int, int]], *, prompt_end: int) -> None:
        nonlocal step_id
        rows = [(lane, at, at + 1 == end and end >= prompt_end)
                for lane, start, end in parts for at in range(start, end)]  # fmt: skip
        lanes, positions, samples = zip(*rows, strict=True)
        pipeline.forward(
            StepBatch(
                epoch=0,
                step_id=step_id,
                operations=(),
                lanes=lanes,
                positions=positions,
                tokens=tuple(tokens[(7 * lane + at) % 4096] for lane, at, _ in rows),
                samples=samples,
                new_lanes={lane: greedy for lane, start, _ in parts if start == 0},
            )
        )
        step_id += 1

    is_mixed = not model.family.is_recurrent
    began_s = time.perf_counter()
    for parts in chunks_of(work, max_rows=context.max_rows, is_mixed=is_mixed):
        step(parts, prompt_end=work.prompt_tokens)
    filled_s = time.perf_counter()
    first = work.prompt_tokens
    for at in range(first, first + work.output_tokens):
        step([(lane, at, at + 1) for lane in range(work.num_sessions)], prompt_end=first)
    ended_s = time.perf_counter()
    pipeline.close()
    return filled_s - began_s, ended_s - filled_s


if __name__ == "__main__":
    path, fields = sys.argv[1:]
    print(json.dumps(measure(Path(path), Work(**json.loads(fields)))))
