"""Before the model is loaded. Without these a probe hangs for as long as a load takes, or the port
is lost between the two servers."""

from __future__ import annotations

import httpx
import pytest

from skippy_mesh.gateway.opening import saying_loading
from skippy_mesh.gateway.server import listen


def test_who_asks_while_it_loads_is_told_to_come_back():
    with listen("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with saying_loading(sock), httpx.Client(base_url=url) as client:
            for reply in (client.get("/health"), client.post("/v1/chat/completions", json={})):
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "loading")
                assert int(reply.headers["Retry-After"]) >= 1
            assert client.get("/livez").status_code == 200
            ready = client.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "loading")
        with saying_loading(sock):  # the socket is still ours
            assert httpx.get(f"{url}/livez").status_code == 200


def test_a_failed_load_ends_the_answers():
    with (
        listen("127.0.0.1", 0) as sock,
        pytest.raises(ZeroDivisionError),
        saying_loading(sock),
    ):
        raise ZeroDivisionError
