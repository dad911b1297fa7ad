"""What Ray is told, before it is told.

Without these a stock board stays empty, or a name is lost on the way because Ray does not take it.
"""

from __future__ import annotations

import itertools

from coordinator.ray_board import for_ray
from skippy_mesh.exposition import Buckets, Family
from tests.telemetry import step, telemetry_of, token

STOCK = {
    "vllm_generation_tokens": "counter", "vllm_prompt_tokens": "counter",
    "vllm_prefix_cache_hits": "counter", "vllm_prefix_cache_queries": "counter",
    "vllm_request_success": "counter", "vllm_kv_cache_usage_perc": "gauge",
    "vllm_num_requests_running": "gauge", "vllm_num_requests_waiting": "gauge",
    "vllm_num_requests_swapped": "gauge", "vllm_request_queue_time_seconds": "histogram",
    "vllm_request_prefill_time_seconds": "histogram",
    "vllm_request_decode_time_seconds": "histogram",
    "vllm_time_to_first_token_seconds": "histogram",
    "vllm_request_time_per_output_token_seconds": "histogram",
    "vllm_e2e_request_latency_seconds": "histogram", "vllm_request_prompt_tokens": "histogram",
    "vllm_request_generation_tokens": "histogram", "serve_deployment_request_counter": "counter",
}  # fmt: skip


def told() -> dict[str, Family]:
    telemetry = telemetry_of()
    telemetry.observe(step(token(finish_reason="stop"), token("b", finish_reason="abort")))
    return {family.name: family for family in for_ray(telemetry.families(["vllm"]), "mesh")}


def test_all_that_the_stock_boards_ask_for_is_told_and_all_of_ours() -> None:
    families = told()
    others = {name for name in families if not name.startswith("skippy_")}
    assert {name: families[name].kind for name in others} == STOCK
    ours = {family.name.replace(":", "_") for family in telemetry_of().families([])}
    assert ours <= families.keys()


def test_labels_are_those_the_boards_join_by() -> None:
    families = told()
    for name in STOCK:
        for labels, _ in families[name].samples:
            expected = {"model_name"}
            if name == "vllm_request_success":
                expected.add("finished_reason")
            if name == "serve_deployment_request_counter":
                expected |= {"deployment", "replica", "application", "route"}
            assert labels.keys() == expected
    ((tags, count),) = families["serve_deployment_request_counter"].samples
    assert (tags["deployment"], tags["application"], count) == ("skippy_mesh", "mesh", 2)
    ((_, swapped),) = families["vllm_num_requests_swapped"].samples
    assert swapped == 2


def test_buckets_are_narrow_enough_for_a_sum_of_their_middles() -> None:
    for family in told().values():
        for _, value in family.samples:
            if isinstance(value, Buckets):
                ends = [end for end in value.ends if end > 0]
                ratios = [high / low for low, high in itertools.pairwise(ends)]
                assert max(ratios) <= 1.25 + 1e-9, family.name
