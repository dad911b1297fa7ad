"""Live answers beside long prompts: ``python -m bench gap``.

Some clients write answers while others send prompts of 2,000 tokens. What a reader sees is
the longest pause between two tokens; it is told beside the longest step, which holds one chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.load import Stream
from bench.machine import commit, machine_facts
from bench.servers import mesh_command, running
from bench.steplog import Step, StepLog
from bench.workloads import Workload

WRITERS = Workload(prompt_tokens=32, output_tokens=256, seed="writers")
PROMPTS = Workload(prompt_tokens=2000, output_tokens=1, seed="prompts")
NUM_CELLS = 8192


async def times_of(client: httpx.AsyncClient, workload: Workload, index: int) -> list[float]:
    """When each piece of one answer came."""
    stream = Stream()
    async with client.stream("POST", "/v1/completions", json=workload.body(index)) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            stream.feed(line, time.monotonic())
    problem = stream.verdict(workload.output_tokens)
    if problem and stream.texts:
        raise RuntimeError(problem)
    return stream.chunk_times_s


async def load(url: str, num_writers: int, num_prompts: int) -> tuple[list[float], float]:
    """Gaps between the writers' tokens, and how long the prompts took in all."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        writers = [asyncio.create_task(times_of(client, WRITERS, k)) for k in range(num_writers)]
        await asyncio.sleep(1)  # they write by now
        started = time.monotonic()
        await asyncio.gather(*(times_of(client, PROMPTS, k) for k in range(num_prompts)))
        prompts_s = time.monotonic() - started
        times = await asyncio.gather(*writers)
    return [b - a for each in times for a, b in itertools.pairwise(each)], prompts_s


def summary(gaps: Sequence[float], steps: Sequence[Step], prompts_s: float) -> dict[str, object]:
    mixed = [step for step in steps if step.prefill_tokens and step.decode_tokens]
    alone = [step for step in steps if not step.prefill_tokens and step.decode_tokens]
    return {
        "longest_gap_ms": round(1e3 * max(gaps), 1),
        "p50_gap_ms": round(1e3 * sorted(gaps)[len(gaps) // 2], 1),
        "longest_mixed_step_ms": round(1e3 * max(step.step_s for step in mixed), 1),
        "p50_decode_step_ms": round(1e3 * sorted(s.step_s for s in alone)[len(alone) // 2], 1),
        "mixed_steps": len(mixed),
        "most_prefill_rows": max(step.prefill_tokens for step in mixed),
        "prefill_only_steps": sum(not step.decode_tokens for step in steps),
        "prompts_s": round(prompts_s, 2),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gap", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file (%(default)s)")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="per stage (%(default)s)")
    parser.add_argument("--writers", type=int, default=4, help="live answers (%(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="2,000-token prompts (%(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps"
        command = mesh_command(
            args.model, stages=args.stages, engine="mesh", num_cells=NUM_CELLS,
            num_threads=args.threads,
        )  # fmt: skip
        with running("skippy_mesh", [*command, "--step-log", str(log)]) as server:
            steps = StepLog(log)
            gaps, prompts_s = asyncio.run(load(server.url, args.writers, args.prompts))
            found = summary(gaps, steps.steps(), prompts_s)
    for name, value in found.items():
        print(f"{name:>24} {value}")
    print(json.dumps({"machine": machine_facts(), "commit": commit(), **found}))
    return 0
