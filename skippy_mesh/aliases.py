"""The same numbers under the names that dashboards for vLLM and llama-server ask for.

One table each: kind, name, what it is, and where it comes from. Nothing is counted here. Names that
vLLM has given up are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from skippy_mesh.exposition import Family, Histogram, Kind, Labels, Page, Value, by, only
from skippy_mesh.messages import Snapshot
from skippy_mesh.request_totals import RequestTotals
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.step_totals import ITERATION_TOKENS, StepTotals, cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """All there is to tell. ``steps`` is None for an engine without step records, ``state`` when
    nobody knows; ``finished`` is by reason, ``rejected`` by code."""

    model_name: str
    requests: RequestTotals
    steps: StepTotals | None
    state: Snapshot | None
    stages: Sequence[Capacity]
    finished: Mapping[str, float]
    rejected: Mapping[str, float]


Samples = Iterable[tuple[Labels, Value]]
Row = tuple[Kind, str, str, Callable[[Known], Samples]]


def vllm(known: Known) -> list[Family]:
    page = Page({"model_name": known.model_name, "engine": "0"}, prefix="vllm:")
    _fill(page, _VLLM, known)
    bare = Page({"model_name": known.model_name}, prefix="vllm:")  # without an engine, there too
    _fill(bare, _VLLM_ADMISSION, known)
    return [*page.families, *bare.families]


def llamacpp(known: Known) -> list[Family]:
    page = Page({}, prefix="llamacpp:")
    _fill(page, _LLAMACPP, known)
    return page.families


def _fill(page: Page, table: Sequence[Row], known: Known) -> None:
    for kind, name, text, samples in table:
        page.add(kind, name, text, samples(known))


def _requests(histogram: Callable[[RequestTotals], Histogram]) -> Callable[[Known], Samples]:
    return lambda known: [({}, histogram(known.requests).seen())]


def _steps(value: Callable[[StepTotals], float]) -> Callable[[Known], Samples]:
    return lambda known: [] if known.steps is None else only(value(known.steps))


def _state(samples: Callable[[Snapshot], Samples]) -> Callable[[Known], Samples]:
    return lambda known: [] if known.state is None else samples(known.state)


def _usage(known: Known) -> Samples:
    if known.state is None:
        return []
    shares = [
        (counts["active"] + counts["reserved"]) / sum(counts.values())
        for stage in known.stages
        for _, counts in cells(stage, known.state)
    ]
    return only(max(shares)) if shares else []


def _rows(known: Known) -> Samples:
    return [] if known.steps is None else [({}, known.steps.rows.seen(ITERATION_TOKENS))]


def _waiting(state: Snapshot) -> float:
    return sum(state.waiting.values())


def _by_capacity(state: Snapshot) -> Samples:
    deferred = state.waiting.get("order", 0)
    return by("reason", {"capacity": _waiting(state) - deferred, "deferred": deferred})


def _success(known: Known) -> Samples:
    done = known.finished
    reasons = {
        "stop": done["stop"] + done["tool_calls"],
        "length": done["length"],
        "abort": done["abort"],
        "error": done["error"] + done["timeout"],
    }
    return by("finished_reason", reasons)


def _over(count: float, of: float) -> Samples:
    return only(count / of) if of else []


_VLLM: Sequence[Row] = (
    ("gauge", "num_requests_running", "Requests in the running set",
     _state(lambda state: only(state.running))),
    ("gauge", "num_requests_waiting", "Requests that wait, those to resume among them",
     _state(lambda state: only(_waiting(state)))),
    ("gauge", "num_requests_waiting_by_reason",
     "Those that wait for room, and those behind an older one", _state(_by_capacity)),
    ("gauge", "kv_cache_usage_perc",
     "Share of the fullest store that is used or promised, 0 to 1", _usage),
    ("counter", "prompt_tokens", "Prompt tokens, cached ones included",
     lambda known: only(known.requests.num_prompt)),
    ("counter", "prompt_tokens_cached", "Prompt tokens that did not have to be computed",
     lambda known: only(known.requests.num_cached)),
    ("counter", "generation_tokens", "Tokens sampled",
     lambda known: only(known.requests.num_output)),
    ("counter", "prefix_cache_queries", "Tokens looked up in the prefix cache",
     _steps(lambda steps: steps.prefix_tokens["queried"])),
    ("counter", "prefix_cache_hits", "Tokens found in the prefix cache",
     _steps(lambda steps: steps.prefix_tokens["hit"])),
    ("counter", "num_preemptions", "Sequences that gave up their memory",
     _steps(lambda steps: sum(steps.preempted.values()))),
    ("counter", "request_success", "Requests that ended, by reason", _success),
    ("histogram", "time_to_first_token_seconds", "From a request to its first token",
     _requests(lambda totals: totals.first_token_s)),
    ("histogram", "inter_token_latency_seconds", "Between a token and the one before it",
     _requests(lambda totals: totals.gap_s)),
    ("histogram", "request_time_per_output_token_seconds",
     "A request's mean time between tokens", _requests(lambda totals: totals.per_token_s)),
    ("histogram", "e2e_request_latency_seconds", "From a request to its end",
     _requests(lambda totals: totals.e2e_s)),
    ("histogram", "request_queue_time_seconds", "From a request to its leaving the queue",
     _requests(lambda totals: totals.queue_s)),
    ("histogram", "request_prefill_time_seconds", "From leaving the queue to the first token",
     _requests(lambda totals: totals.prefill_s)),
    ("histogram", "request_decode_time_seconds", "From the first token to the last",
     _requests(lambda totals: totals.decode_s)),
    ("histogram", "request_inference_time_seconds", "From leaving the queue to the last token",
     _requests(lambda totals: totals.inference_s)),
    ("histogram", "request_prompt_tokens", "Prompt tokens of a request",
     _requests(lambda totals: totals.prompt)),
    ("histogram", "request_generation_tokens", "Tokens sampled for a request",
     _requests(lambda totals: totals.output)),
    ("histogram", "iteration_tokens_total", "Rows of a step", _rows),
    ("histogram", "request_num_preemptions",
     "Times a request gave up its memory before it ended",
     _requests(lambda totals: totals.preemptions)),
)  # fmt: skip

_VLLM_ADMISSION: Sequence[Row] = (
    ("counter", "admission_rejections", "Requests refused because the queue was full",
     lambda known: by("reason", {
         "max_num_queued_reqs": known.rejected["queue_full"],
         "max_num_queued_tokens": known.rejected["queue_tokens_full"]})),
)  # fmt: skip

_LLAMACPP: Sequence[Row] = (
    ("counter", "prompt_tokens", "Prompt tokens computed, cached ones not among them",
     lambda known: only(known.requests.num_prompt - known.requests.num_cached)),
    ("counter", "prompt_tokens_cached", "Prompt tokens that did not have to be computed",
     lambda known: only(known.requests.num_cached)),
    ("counter", "prompt_seconds", "From leaving the queue to the first token, of all requests",
     lambda known: only(known.requests.all_prefill_s)),
    ("counter", "tokens_predicted", "Tokens sampled",
     lambda known: only(known.requests.num_output)),
    ("counter", "tokens_predicted_seconds", "From the first token on, of all requests",
     lambda known: only(known.requests.all_decode_s)),
    ("counter", "n_decode", "Steps, each one call of llama_decode on every stage",
     _steps(lambda steps: steps.num_steps)),
    ("gauge", "n_tokens_max", "The longest sequence that has ended",
     lambda known: [] if known.requests.longest is None else only(known.requests.longest)),
    ("gauge", "requests_processing", "Requests in the running set",
     _state(lambda state: only(state.running))),
    ("gauge", "requests_deferred", "Requests that wait",
     _state(lambda state: only(_waiting(state)))),
    ("gauge", "n_busy_slots_per_decode", "Requests that ran, mean over all steps",
     lambda known: [] if known.steps is None else _over(
         known.steps.num_busy, known.steps.num_steps)),
    ("gauge", "prompt_tokens_seconds", "Prompt tokens computed a second, mean over all requests",
     lambda known: _over(
         known.requests.num_prompt - known.requests.num_cached, known.requests.all_prefill_s)),
    ("gauge", "predicted_tokens_seconds", "Tokens sampled a second, mean over all requests",
     lambda known: _over(known.requests.num_output, known.requests.all_decode_s)),
)  # fmt: skip
