"""The log's line for each request. Without these what somebody asked is in a log that nobody said
may have it, or a request leaves no trace."""

from __future__ import annotations

import logging
import re
import time

import httpx
import pytest

from skippy_mesh import logs
from skippy_mesh.gateway.rules import ApiRules
from stages.fake import FakePipeline
from tests.unit.test_gateway import COMPLETIONS, eventually, serving

SECRET = "nobody may read this"
_LINE = re.compile(
    r"request (\S+): (\d+) prompt tokens \((\d+) cached\), (\d+) tokens, (\S.*); "
    r"first after \d+\.\d\d s, \d+\.\d\d s"
)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="skippy_mesh.gateway.request_log")
    return caplog


def lines(said: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in said.records if each.name.endswith("request_log")]


def ask(client: httpx.Client, **fields: object) -> None:
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, **fields}
    reply = client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "r1"})
    assert reply.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_without_its_text(
    said: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    with serving() as client:
        ask(client, stream=stream, n=2)
        eventually(lambda: bool(lines(said)))
    (line,) = lines(said)
    found = _LINE.fullmatch(line)
    assert found is not None, line
    assert found.groups() == ("r1", str(len(SECRET) + 1), "0", "10", "length, length")


def test_the_text_is_there_where_it_may_be(said: pytest.LogCaptureFixture) -> None:
    with serving(rules=ApiRules(logs_prompts=True)) as client:
        body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    _, line = lines(said)
    assert SECRET in line and line.endswith(f"answer {text!r}")


def test_who_leaves_is_told_apart(said: pytest.LogCaptureFixture) -> None:
    with serving(FakePipeline(on_step=lambda _: time.sleep(0.01))) as client:
        body = {"prompt": SECRET, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as reply:
            next(reply.iter_lines())
        eventually(lambda: bool(lines(said)))
    (line,) = lines(said)
    found = _LINE.fullmatch(line)
    assert found is not None and found[5] == "left"


def test_a_level_is_for_our_own_loggers() -> None:
    ours, root = logging.getLogger("skippy_mesh"), logging.getLogger()
    before = ours.level, root.level
    try:
        logs.set_up("debug")
        assert (ours.level, root.level) == (logging.DEBUG, before[1])
        logs.set_up_all()
        assert (ours.level, root.level) == (logging.DEBUG, logging.DEBUG)
    finally:
        root.setLevel(before[1])
        for package in ("skippy_mesh", "stages", "coordinator"):
            logging.getLogger(package).setLevel(before[0])
