"""Figures of traces made by hand. A wrong definition would flatter one engine or the other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.console import block
from bench.figures import DEFAULT_SLO, PRESETS, Slo, details, relative_slo, summarise
from bench.records import Record, Run
from tests.unit.test_bench_load import make_record


def run_of(*records: Record, probes: tuple[Record, ...] = ()) -> Run:
    return Run(records=list(records), probes=list(probes), client_cpu_share=0.1)


def summary_of(*records: Record, slo: Slo = DEFAULT_SLO) -> dict[str, Any]:
    return summarise(run_of(*records), slo)


def even(index: int, ttft_s: float, gap_s: float, **knobs: Any) -> Record:
    """Sent at 10; five tokens, a chunk each, ``gap_s`` apart."""
    times = tuple(10 + ttft_s + gap_s * at for at in range(5))
    return make_record(index=index, chunk_times_s=times, end_s=times[-1], **knobs)


def test_every_latency_has_its_mean_spread_and_percentiles() -> None:
    found = summary_of(*[even(at, ttft_s=1.0 + at, gap_s=0.5) for at in range(5)])
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == found["p50_ttft_ms"] == 3000
    assert found["std_ttft_ms"] == pytest.approx(1414.21, abs=0.01)
    assert found["p90_ttft_ms"] == pytest.approx(4600)
    assert found["p95_ttft_ms"] == pytest.approx(4800)
    assert found["p99_ttft_ms"] == pytest.approx(4960)
    assert found["mean_tpot_ms"] == found["mean_itl_ms"] == pytest.approx(500)
    assert found["num_itl"] == 20 and found["max_itl_ms"] == pytest.approx(500)
    assert found["mean_e2el_ms"] == pytest.approx(5000)
    assert found["total_token_throughput"] == pytest.approx((5 * 7 + 25) / 7)


def test_goodput_wants_every_limit_and_attainment_counts_over_all_sent() -> None:
    slo = Slo({"ttft": 2000.0, "tpot": 125.0})
    records = [
        even(0, 1.0, 0.0625),
        even(1, 2.0, 0.125),  # at the limits
        even(2, 3.0, 0.0625),  # late
        even(3, 1.0, 0.25),  # slow
        even(4, 1.0, 0.0625, error="torn"),
        make_record(index=5, error="HTTP 429", status=429, code="429 queue_full"),
        make_record(index=6, is_cut=True),
        make_record(index=7, error="1 tokens came", finish_reason="abort", code="aborted"),
    ]
    found = summary_of(*records, slo=slo)
    assert found["attainment"] == 2 / 8
    assert found["attainment_ttft"] == found["attainment_tpot"] == 3 / 8
    assert found["attainment_itl"] is None and found["attainment_e2el"] is None
    duration = max(r.end_s for r in records[:4]) - 10
    assert found["request_goodput"] == pytest.approx(2 / duration)
    assert (found["sent"], found["completed"], found["failed"]) == (8, 4, 3)
    assert (found["rejected"], found["timeouts"], found["aborted"]) == (1, 1, 1)
    assert found["failures"] == {"torn": 1, "429 queue_full": 1, "aborted": 1}


def test_dropping_hard_requests_does_not_raise_attainment() -> None:
    easy, hard = even(0, 0.1, 0.1), even(1, 9.0, 0.1)
    served = summary_of(easy, hard)["attainment"]
    dropped = summary_of(easy, even(1, 9.0, 0.1, error="gone"))["attainment"]
    assert served == dropped == 0.5


def test_a_single_token_is_soon_enough_and_has_no_time_per_token() -> None:
    one = make_record(chunk_times_s=(10.5,), completion_tokens=1)
    found = summary_of(one)
    assert found["attainment_tpot"] == 1.0 and found["mean_tpot_ms"] is None


def test_a_preset_bounds_the_longest_gaps_too() -> None:
    stall = make_record(chunk_times_s=(10.1, 10.11, 10.9), completion_tokens=3)
    assert summary_of(stall, slo=PRESETS["chat"])["attainment"] == 0.0
    assert summary_of(stall, slo=PRESETS["chat"])["attainment_ttft"] == 1.0


def test_relative_limits_are_multiples_of_the_lone_client_s() -> None:
    slo = relative_slo({"p50_ttft_ms": 10.0, "p50_tpot_ms": 2.0})
    assert slo is not None and slo.limits_ms == {"ttft": 50.0, "tpot": 6.0}
    assert relative_slo({"p50_ttft_ms": 10.0, "p50_tpot_ms": None}) is None


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    late = make_record(scheduled_s=8.0, sent_s=10.0, chunk_times_s=(12.0, 13.0, 16.0))
    assert late.ttft_s == 4.0 and late.e2e_s == 8.0
    queued = make_record(scheduled_s=8.0, queue_s=2.0, sent_s=10.0)
    assert queued.ttft_s == 2.0 and queued.e2e_with_queue_s == 8.0
    found = summary_of(queued)
    assert found["p50_queue_ms"] == 2000 and found["p50_e2el_with_queue_ms"] == 8000
    assert found["p50_e2el_ms"] == 6000
    assert "p50_queue_ms" not in summary_of(late), "no cap, no queue"


def test_probes_stand_apart() -> None:
    probes = (
        make_record(chunk_times_s=(10.2,)),
        make_record(chunk_times_s=(10.4,)),
        make_record(error="torn"),
    )
    found = summarise(run_of(make_record(), probes=probes))
    assert (found["sent"], found["probe_completed"], found["probe_failed"]) == (1, 2, 1)
    assert found["probe_median_e2el_ms"] == pytest.approx(300)
    assert found["probe_max_e2el_ms"] == pytest.approx(400)
    assert "probe_completed" not in summary_of(make_record())


def test_cached_tokens_are_counted_where_they_are_told() -> None:
    told = make_record(cached_tokens=3)
    assert summary_of(told, make_record(index=1))["cached_tokens"] == 3
    assert summary_of(make_record())["cached_tokens"] is None


def test_the_fullest_second_counts_chunks() -> None:
    times = (12.0, 12.1, 12.9, 13.1)
    assert summary_of(make_record(chunk_times_s=times))["max_output_tokens_per_s"] == 3


def test_nothing_known_is_null_in_json_and_has_no_row() -> None:
    found = summary_of(make_record(error="gone", chunk_times_s=()))
    text = json.dumps(found)
    assert "NaN" not in text and found["p99_itl_ms"] is None and found["request_goodput"] is None
    shown = block(found)
    assert "TTFT" not in shown and "throughput" not in shown
    assert "Failed with gone:" in shown


def test_the_block_has_the_labels_scripts_look_for() -> None:
    document = {**summary_of(make_record()), "max_concurrency": 8, "request_rate": "inf"}
    lines = block(document).splitlines()
    assert lines[0].strip("=") == " Serving Benchmark Result " and len(lines[0]) == 50
    values = {line[:40].strip(): line[40:].strip() for line in lines}
    assert values["Successful requests:"] == "1"
    assert values["Benchmark duration (s):"] == "7.00"
    assert values["Mean TTFT (ms):"] == values["P99 TTFT (ms):"] == "2000.00"
    assert values["Median E2EL (ms):"] == "6000.00"
    assert values["Request rate configured (RPS):"] == "inf"


def test_details_are_in_the_order_of_the_requests_and_in_seconds() -> None:
    found = details(run_of(make_record(), make_record(index=1, sent_s=11.0, error="torn")))
    assert found["start_times"] == [0.0, 1.0] and found["errors"] == ["", "torn"]
    assert found["ttfts"] == [2.0, 2.0] and found["itls"] == [[1.0, 3.0]] * 2
    assert found["input_lens"] == [7, 7] and found["output_lens"] == [5, 5]
