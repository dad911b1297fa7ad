"""The engine inside stage 0's actor: many sessions over Ray, and an end for each whatever dies."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time

import pytest
import ray

from coordinator import launch
from coordinator.launch import cluster_nodes, mesh
from skippy_mesh.client import EngineClient
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.errors import SkippyError, UsageError
from skippy_mesh.messages import Request, SamplingParams
from tests import engines
from tests.engines import submit

CONTEXT = ContextConfig(num_cells=2048, num_lanes=8, num_threads=1)
ENDS_WITHIN_S = 60  # a second or two in truth
pytestmark = pytest.mark.usefixtures("cluster")
names = (f"mesh{number}" for number in itertools.count())


@contextlib.contextmanager
def running(model, cuts=(2,), **options):
    specs = specs_of(model, 6, cuts, CONTEXT)
    with (
        mesh(specs, EngineSettings(), mesh_name=next(names), **options) as started,
        contextlib.closing(
            EngineClient(started.channel, max_model_len=started.max_model_len)
        ) as client,
    ):
        yield started, client


def request(number, max_tokens=24):
    sampling = SamplingParams(temperature=1.0, seed=number) if number % 2 else SamplingParams()
    return Request(
        request_id=str(number),
        token_ids=tuple(3 + (7 * at + 31 * number) % 300 for at in range(20 + 40 * (number % 3))),
        max_tokens=max_tokens,
        sampling=sampling,
    )


def until_end(events):
    return engines.until_end(events, within_s=ENDS_WITHIN_S)


@pytest.fixture(scope="module")
def alone(cluster, model):
    """Each request by itself, on the undivided model."""
    with running(model, ()) as (started, client):
        assert len(started.infos) == 1
        answers = [until_end(submit(client, request(number)))[0] for number in range(8)]
    assert len({tuple(answer) for answer in answers}) == 8
    return answers


@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_eight_sessions_over_actors_answer_as_each_alone(model, alone, cuts):
    with running(model, cuts) as (started, client):
        assert len({info.process_id for info in started.infos} | {os.getpid()}) == len(cuts) + 2
        streams = [submit(client, request(number)) for number in range(8)]
        ends = [until_end(stream) for stream in streams]
    assert [tokens for tokens, _ in ends] == alone
    assert {event.finish_reason for _, event in ends} == {"length"}


def test_who_waits_for_a_mesh_is_told_how_far_each_stage_is(model):
    seen = []
    with running(model, on_load=seen.append):
        pass
    assert {len(states) for states in seen} == {2}
    assert [state.phase for state in seen[-1]] == ["loaded"] * 2


def test_an_aborted_session_ends_and_the_others_do_not_notice(model, alone):
    with running(model) as (_, client):
        leaver = submit(client, request(100, max_tokens=1500))
        streams = [submit(client, request(number)) for number in range(4)]
        leaver.get(timeout=ENDS_WITHIN_S)
        assert client.abort("100")
        _, event = until_end(leaver)
        assert event.finish_reason == "abort"
        assert [until_end(stream)[0] for stream in streams] == alone[:4]
        assert not client.abort("100")


def processes():
    """The process of each stage that is loaded, of the one mesh there is."""
    names = (actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    found = {}
    for actor in [ray.get_actor(name) for name in names if "_stage_" in name]:
        with contextlib.suppress(ray.exceptions.RayError):
            info = ray.get(actor.info.remote(), timeout=ENDS_WITHIN_S)
            found |= {} if info is None else {info.index: info.process_id}
    return found


def progress(streams, count):
    """What has come of each of ``streams``, and ``count`` tokens that come from now on."""
    tokens = [[] for _ in streams]
    for stream, found in zip(streams, tokens, strict=True):
        for _ in range(stream.qsize() + count):
            found.append(stream.get(timeout=ENDS_WITHIN_S).token_id)
    return tokens


def kill(victim):
    """Returns when the stage is loaded again."""
    was = processes()
    os.kill(was[victim], signal.SIGKILL)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while processes().get(victim, was[victim]) == was[victim]:
        assert time.monotonic() < deadline, "it did not come back in time"
        time.sleep(0.05)
    others = {stage for stage, process in processes().items() if process == was[stage]}
    assert others == was.keys() - {victim}, "a stage that lives is not loaded again"


@pytest.fixture(scope="module")
def long_alone(cluster, model):
    with running(model, ()) as (_, client):
        return [until_end(submit(client, request(number, 600)))[0] for number in range(3)]


def test_a_stage_that_dies_is_a_pause_and_not_a_byte_differs(model, long_alone):
    """Each stage in turn, while three sessions are in the middle of their answers."""
    with running(model, (1, 3)) as (started, client):
        streams = [submit(client, request(number, 600)) for number in range(3)]
        tokens = progress(streams, 3)
        for victim in (1, 2, 0):
            kill(victim)
            # Past their trials: one that is alone when a stage dies is taken for the reason.
            more = progress(streams, 3)
            tokens = [before + after for before, after in zip(tokens, more, strict=True)]
        ends = [until_end(stream) for stream in streams]
        assert {event.finish_reason for _, event in ends} == {"length"}
        tokens = [before + rest for before, (rest, _) in zip(tokens, ends, strict=True)]
        assert tokens == long_alone
        assert started.silent_stages() == {}


def test_a_stage_that_dies_while_nothing_runs_is_there_for_the_next_request(model, alone):
    with running(model) as (started, client):
        for victim in (0, 1):
            kill(victim)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while started.silent_stages():
            assert time.monotonic() < deadline, "it did not come back in time"
        assert until_end(submit(client, request(3)))[0] == alone[3]


def test_a_stage_that_hangs_is_started_again_and_the_answer_goes_on(model, long_alone, monkeypatch):
    monkeypatch.setattr(launch, "STUCK_S", 2.0)
    with running(model) as (_, client):
        stream = submit(client, request(1, 600))
        (tokens,) = progress([stream], 3)
        os.kill(processes()[1], signal.SIGSTOP)
        rest, event = until_end(stream)
        assert event.finish_reason == "length"
        assert tokens + rest == long_alone[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_that_dies_once_too_often_ends_every_open_session_once(model, victim):
    with running(model, max_restarts=1) as (started, client):
        streams = [submit(client, request(number, 1500)) for number in range(3)]
        progress(streams, 3)
        kill(victim)
        progress(streams, 3)
        os.kill(processes()[victim], signal.SIGKILL)
        ends = [until_end(stream)[1] for stream in streams]
        assert {event.finish_reason for event in ends} == {"error"}
        assert all(f"stage {victim}" in event.error for event in ends)
        assert all(stream.empty() for stream in streams), "one end each"
        assert f"stage {victim} " in started.silent_stages()[victim]
        # With stage 0 the channel is gone; with another, the engine is there to say no.
        try:
            _, event = until_end(submit(client, request(9)))
            assert (event.finish_reason, event.error) == ("error", ends[0].error)
        except SkippyError as error:
            assert "stage 0" in str(error)


def test_a_ceiling_asked_too_high_is_refused_with_what_binds_it(model):
    with (
        pytest.raises(UsageError, match=r"--parallel 9 .*stage 0 allows by its (lanes|attention)"),
        running(model, (), parallel=9),
    ):
        raise AssertionError("started")


def test_a_mesh_leaves_no_actor_behind(model):
    with running(model) as (_, client):
        submit(client, request(1, max_tokens=1500)).get(timeout=ENDS_WITHIN_S)
    assert not [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"]]


def test_a_plan_can_ask_the_cluster_what_its_nodes_may_give():
    (node,) = cluster_nodes()
    assert 2**28 < node.usable_bytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert node.bytes_per_s is None
