"""What a server says of itself, from pages made by hand. What it does not say is not made up."""

from __future__ import annotations

import pytest

from bench.server_side import Observed, Reading, costs_of_point, kv_per_session, prices_of, read
from coordinator.costs import LayerCosts
from tests.bench_engines import PlantedEngine, up


def page(*lines: str) -> Reading:
    return Reading.parse("\n".join(lines) + "\n")


BEFORE = page(
    "# TYPE skippy:steps_total counter",
    'skippy:steps_total{kind="decode",model_name="m"} 10.0',
    'skippy:steps_total{kind="mixed",model_name="m"} 2.0',
    'skippy:step_tokens_total{phase="prefill"} 100',
    'skippy:step_tokens_total{phase="decode"} 50',
    'skippy:step_tokens_total{phase="recompute"} 0',
    'skippy:recomputed_tokens_total{part="prompt"} 0',
    'skippy:recomputed_tokens_total{part="output"} 0',
    'skippy:prefix_tokens_total{result="hit"} 5',
    'skippy:prefix_tokens_total{result="queried"} 5',
    'skippy:stage_compute_seconds_sum{stage="0"} 1.0',
    'skippy:stage_compute_seconds_sum{stage="1"} 1.0',
    'skippy:stage_wait_seconds_total{stage="0"} 0.0',
    'skippy:stage_wait_seconds_total{stage="1"} 0.5',
    "vllm:num_preemptions_total 7",
)
AFTER = page(
    'skippy:steps_total{kind="decode",model_name="m"} 14.0',
    'skippy:steps_total{kind="mixed",model_name="m"} 8.0',
    'skippy:step_tokens_total{phase="prefill"} 130',
    'skippy:step_tokens_total{phase="decode"} 90',
    'skippy:step_tokens_total{phase="recompute"} 30',
    'skippy:recomputed_tokens_total{part="prompt"} 20',
    'skippy:recomputed_tokens_total{part="output"} 10',
    'skippy:prefix_tokens_total{result="hit"} 35',
    'skippy:prefix_tokens_total{result="queried"} 65',
    'skippy:stage_compute_seconds_sum{stage="0"} 3.0',
    'skippy:stage_compute_seconds_sum{stage="1"} 4.6',
    'skippy:stage_wait_seconds_total{stage="0"} 1.0',
    'skippy:stage_wait_seconds_total{stage="1"} 0.5',
    'skippy:memory_peak_bytes{stage="0",kind="rss"} 400',
    'skippy:memory_peak_bytes{stage="1",kind="rss"} 300',
)


def test_a_point_costs_what_the_counters_rose() -> None:
    flying = [page(f"skippy:batches_in_flight {n}") for n in (1, 2, 0)]
    found = costs_of_point(Observed(BEFORE, AFTER, flying), duration_s=4.0)
    assert found == {
        "steps": 10.0,
        "rows_a_step": 10.0,
        "prefill_tokens": 30.0,
        "recomputed_tokens": 30.0,
        "recompute_tax": 0.3,
        "preemptions": None,
        "prefix_hit_tokens": 30.0,
        "prefix_hit_rate": 0.5,
        "prompt_share_not_computed": 0.5,
        "batches_in_flight": 2.0,
        "stage_busy_share": [0.5, 0.9],
        "stage_bubble_share": [0.25, 0.0],
        "peak_memory_bytes": [400.0, 300.0],
    }


def test_a_server_that_tells_nothing_is_not_told_to_have_done_nothing() -> None:
    empty = page("python_info 1")
    found = costs_of_point(Observed(empty, empty), duration_s=4.0)
    assert set(found.values()) == {None}
    assert kv_per_session([empty], [{"attention": 1}]) == {
        "kv_bytes_per_session": None, "max_running": None
    }  # fmt: skip


def moment(running: int, attention: int, states: int) -> Reading:
    return page(
        f"skippy:requests_running {running}",
        *(
            f'skippy:kv_cells{{stage="{stage}",component="{name}",state="active"}} {count}'
            for stage in (0, 1)
            for name, count in (("attention", attention), ("recurrent", states))
        ),
        'skippy:kv_cells{stage="0",component="attention",state="resident"} 1000',
    )


def test_a_session_s_bytes_are_those_of_the_fullest_moment_over_all_stages() -> None:
    layers = [
        LayerCosts(weights=1, attention_per_cell=3),
        LayerCosts(weights=1, recurrent_per_id=70),
        LayerCosts(weights=1, attention_per_cell=5, recurrent_per_id=30),
    ]
    prices = prices_of(layers, [(0, 1), (1, 3)])
    assert prices == [
        {"attention": 3, "window": 0, "recurrent": 0},
        {"attention": 5, "window": 0, "recurrent": 100},
    ]
    moments = [moment(2, 90, 2), moment(4, 10, 4), moment(4, 80, 4), moment(1, 70, 1)]
    found = kv_per_session(moments, prices)
    assert found == {"kv_bytes_per_session": (80 * 8 + 4 * 100) / 4, "max_running": 4}


def test_a_page_is_read_from_a_server() -> None:
    with up(PlantedEngine(service_s=0.0)) as url:
        found = read(url)
    assert found.total("requests_running") == 0
    assert found.total("no_such_family") is None
    assert found.by("stage", "stage_wait_seconds_total") == {"0": pytest.approx(0)}
