"""The OpenAPI document, and what comes of bodies made from it. Without these a client generated
from it is refused, or something it may send ends in a fault of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.schemas import OpenApiSchema

from stages.fake import FakePipeline
from tests.engines import RunningEngine
from tests.unit.test_gateway import serving


@pytest.fixture(scope="module")
def api() -> Iterator[OpenApiSchema]:
    with serving(engine=RunningEngine(FakePipeline(), num_residents=4)) as client:
        yield schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_that_may_be_sent_is_a_fault_of_ours(case: schemathesis.Case) -> None:
    reply = case.call()
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) >= {"message", "type", "param", "code"}


def test_the_document_names_every_route_that_takes_a_body() -> None:
    with serving() as client:
        paths = client.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            for method in methods:
                reply = client.request(method, path, json={} if method == "post" else None)
                assert reply.status_code not in (404, 405), path
