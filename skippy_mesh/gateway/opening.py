"""What answers while the model is loaded: who asks is told to come back, and not left waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skippy_mesh.gateway.errors import Edge
from skippy_mesh.gateway.readiness import LOADING, not_ready

_ALIVE = ("/livez", "/ping")


@contextmanager
def saying_loading(sock: socket.socket) -> Iterator[None]:
    """Answer on ``sock``, which stays open, until the block ends."""
    server = uvicorn.Server(
        uvicorn.Config(_app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    )
    # The server closes what it is given.
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [sock.dup()]}, name="loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _app() -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _ALIVE:
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif scope["path"] == "/ready":
            await not_ready("loading", None)(scope, receive, send)
        else:
            raise LOADING.error()

    return Edge(answer)
