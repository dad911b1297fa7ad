"""The process around the app: the socket, the web server's thread, and an orderly end.

The engine keeps the calling thread, because a single stage's context belongs to the thread that
built it; uvicorn runs beside it. On SIGINT or SIGTERM the server stops accepting, running streams
get a few seconds, and the engine ends.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Sequence

import uvicorn

from skippy_mesh.engine import Engine
from skippy_mesh.errors import SkippyError, UsageError
from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.chat import Tokenizer

_DRAIN_S = 5
_READY = """\
skippy_mesh ready on {url} (stages {num_stages}, ceiling 1, bound by engine lanes, exact no)
{note}
Try it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages":[{{"role":"user","content":"Why is the sky blue?"}}],"max_tokens":64}}'
"""
_NOTE = "engine: baseline, one request at a time; exact: no, because no self-test has proved it yet"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow happens."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is not in [0, 65535]")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Naming TCP is what makes asyncio switch off Nagle's delay on each connection.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise UsageError(f"cannot listen on host {host!r}: {error.strerror}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise SkippyError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from error
    return sock


def serve(
    sock: socket.socket,
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    health: Callable[[], str | None],
    api_keys: Sequence[str],
    num_stages: int,
) -> None:
    """Serve until a signal. Runs the engine on this thread."""
    app = create_app(engine, tokenizer, model_name=model_name, health=health, api_keys=api_keys)
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=_DRAIN_S
    )
    server = uvicorn.Server(config)

    def run_server() -> None:
        try:
            server.run(sockets=[sock])
        finally:
            engine.close()

    def stop(_signal: int, _frame: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    thread = threading.Thread(target=run_server, name="http")
    thread.start()
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(_READY.format(url=url, num_stages=num_stages, note=_NOTE), end="", flush=True)
    engine.run()
    thread.join()
