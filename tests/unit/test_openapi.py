"""The OpenAPI document, and what comes of bodies made from it. Without these a client generated
from it is refused, or something it may send ends in a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from skippy_mesh.gateway.openapi import document
from stages.fake import FakePipeline
from tests.engines import RunningEngine
from tests.unit.test_gateway import serving

DOCUMENT = document()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(engine=RunningEngine(FakePipeline(), num_residents=4)) as found:
        yield found


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_nothing_that_may_be_sent_is_a_fault_of_ours(
    client: httpx.Client, path: str, method: str
) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]

    @given(case=operation.as_strategy())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def send(case: Any) -> None:
        reply = case.call(base_url=str(client.base_url))
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) >= {"message", "type", "param", "code"}

    send()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_document_names_is_there(client: httpx.Client, path: str, method: str) -> None:
    reply = client.request(method, path, json={} if method == "post" else None)
    assert reply.status_code not in (404, 405)
