"""Requests of an open loop do not wait for one another, and probes ride beside both kinds."""

from __future__ import annotations

import asyncio

from bench.figures import summarise
from bench.load import closed_loop, open_loop
from bench.records import max_in_flight
from bench.workloads import Workload
from tests.bench_engines import PlantedEngine, up

WORKLOAD = Workload(prompt_tokens=8, output_tokens=4)
SERVICE_S = 0.3


def test_requests_are_sent_when_they_are_due_whatever_became_of_others() -> None:
    times = [0.0, 0.05, 0.1, 0.15]
    with up(PlantedEngine(service_s=SERVICE_S)) as url:
        run = asyncio.run(open_loop(url, WORKLOAD, times_s=times, drain_s=20))
    assert all(record.is_complete for record in run.records)
    assert max_in_flight(run.records) == 4
    due = [record.scheduled_s - run.records[0].scheduled_s for record in run.records]
    assert [round(each, 6) for each in due] == times
    assert all(record.sent_s >= record.scheduled_s for record in run.records)
    assert not any(record.queue_s for record in run.records)


def test_who_waits_for_the_client_s_own_permit_is_counted_apart() -> None:
    with up(PlantedEngine(service_s=SERVICE_S)) as url:
        run = asyncio.run(
            open_loop(url, WORKLOAD, times_s=[0.0, 0.0, 0.0], drain_s=20, max_concurrency=1)
        )
    assert max_in_flight(run.records) == 1
    waits = sorted(record.queue_s for record in run.records)
    assert waits[1] >= SERVICE_S and waits[2] >= 2 * SERVICE_S
    last = max(run.records, key=lambda record: record.queue_s)
    assert last.e2e_s is not None and last.e2e_with_queue_s is not None
    assert last.e2e_with_queue_s >= last.e2e_s + 2 * SERVICE_S
    assert summarise(run)["p99_queue_ms"] is not None


def test_time_up_cuts_what_an_open_loop_has_open() -> None:
    with up(PlantedEngine(service_s=60.0)) as url:
        run = asyncio.run(open_loop(url, WORKLOAD, times_s=[0.0, 0.1], drain_s=0.3))
    assert [record.is_cut for record in run.records] == [True, True]


def test_probes_are_not_held_back_by_the_cap_and_are_not_among_the_records() -> None:
    with up(PlantedEngine(service_s=SERVICE_S)) as url:
        run = asyncio.run(
            closed_loop(
                url, WORKLOAD, num_clients=1, max_requests=3, send_s=20, drain_s=20, probe_rate=8.0
            )
        )
    assert len(run.records) == 3 and len(run.probes) >= 3
    assert max_in_flight(run.probes) > 1
    assert {probe.completion_tokens for probe in run.probes} == {1}
    assert {record.completion_tokens for record in run.records} == {4}


def test_who_is_refused_pauses_and_is_told_when_to_come_back() -> None:
    with up(PlantedEngine(service_s=0.05, num_lanes=1, max_open=1)) as url:
        run = asyncio.run(
            closed_loop(
                url, WORKLOAD, num_clients=2, max_requests=100, send_s=0.6, drain_s=20,
                refused_pause_s=0.2,
            )
        )  # fmt: skip
    refused = [record for record in run.records if record.is_rejected]
    assert 1 <= len(refused) <= 8
    assert {(r.code, r.retry_after, r.status) for r in refused} == {("429 queue_full", "1", 429)}
