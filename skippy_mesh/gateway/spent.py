"""What a request cost: tokens, recomputation and time, as two ecosystems call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_mesh.times import RequestTimes


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that were sampled, those of the prompts that were not computed, and what memory
    pressure cost."""

    num_output: int
    num_cached: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0


def metrics(spent: Spent, times: RequestTimes) -> dict[str, object]:
    """vLLM's names. What is not known is not there."""
    found: dict[str, float | None] = {
        "queue_time_ms": _ms(times.queue_s),
        "time_to_first_token_ms": _ms(times.first_token_s),
        "generation_time_ms": _ms(times.decode_s),
    }
    if times.decode_s and spent.num_output > 1:
        found["mean_itl_ms"] = 1000 * times.decode_s / (spent.num_output - 1)
        found["tokens_per_second"] = (spent.num_output - 1) / times.decode_s
    return {name: value for name, value in found.items() if value is not None}


def timings(spent: Spent, times: Sequence[RequestTimes], num_prompt: int) -> dict[str, object]:
    """llama-server's names, over all choices: prompts until the first token of any, then until the
    last. A rate over no time is not there."""
    starts = [each.started_s for each in times if each.started_s is not None]
    firsts = [each.first_s for each in times if each.first_s is not None]
    lasts = [each.last_s for each in times if each.last_s is not None]
    found: dict[str, object] = {"cache_n": spent.num_cached}
    found |= _phase("prompt", num_prompt - spent.num_cached, starts, firsts[:1] and [min(firsts)])
    return found | _phase("predicted", spent.num_output, firsts, lasts)


def _phase(
    name: str, count: int, starts: Sequence[float], ends: Sequence[float]
) -> dict[str, object]:
    found: dict[str, object] = {f"{name}_n": count}
    if not starts or not ends:
        return found
    taken_s = max(ends) - min(starts)
    found[f"{name}_ms"] = 1000 * taken_s
    if count and taken_s > 0:
        found[f"{name}_per_token_ms"] = 1000 * taken_s / count
        found[f"{name}_per_second"] = count / taken_s
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
