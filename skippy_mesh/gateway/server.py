"""The process around the app: the socket, the web server's thread, and an orderly end.

The engine keeps the calling thread, because a single stage's context belongs to the thread that
built it; uvicorn runs beside it. On SIGINT or SIGTERM the server stops accepting, running requests
get a few seconds and are then aborted, and the engine ends. A second signal aborts at once.
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

_WATCH_S = 1.0
_DRAIN_S = 5
_ABORT_S = 10  # for the last events to reach their clients
_READY = """\
skippy_mesh ready on {url} (stages {num_stages}, ceiling 1, bound by engine lanes, exact {exact})
engine: baseline, one request at a time
exact: {why} ({profile})
Try it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages":[{{"role":"user","content":"Why is the sky blue?"}}],"max_tokens":64}}'
"""


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


class Watch:
    """Asks whether the stages are alive every second, on a thread of its own.

    ``problem`` is the last answer, so a health question never waits for a stage.
    """

    def __init__(self, check_alive: Callable[[], str | None]):
        self.problem: str | None = None
        self._check_alive = check_alive
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(_WATCH_S):
            self.problem = self._check_alive()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


def serve(
    sock: socket.socket,
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    check_alive: Callable[[], str | None],
    api_keys: Sequence[str],
    num_stages: int,
    why_inexact: str | None,
    profile: str,
) -> None:
    """Serve until a signal. Runs the engine on this thread."""
    watch = Watch(check_alive)
    app = create_app(
        engine,
        tokenizer,
        model_name=model_name,
        health=lambda: watch.problem,
        api_keys=api_keys,
        exact=why_inexact is None,
        exact_reason=why_inexact,
    )
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=_DRAIN_S + _ABORT_S
    )
    server = uvicorn.Server(config)
    # Streams end with a reason. What uvicorn cancels would break off, with a traceback.
    drain = threading.Timer(_DRAIN_S, engine.close)
    drain.daemon = True

    def run_server() -> None:
        try:
            server.run(sockets=[sock])
        finally:
            engine.close()

    def stop(_signal: int, _frame: object) -> None:
        if server.should_exit:
            # Not here: this thread may be inside the engine and hold its lock.
            threading.Thread(target=engine.close, daemon=True).start()
        else:
            drain.start()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    thread = threading.Thread(target=run_server, name="http")
    thread.start()
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    exact = "yes" if why_inexact is None else "no"
    why = why_inexact or "every stage's self-test passed"
    ready = _READY.format(url=url, num_stages=num_stages, exact=exact, why=why, profile=profile)
    print(ready, end="", flush=True)
    engine.run()
    thread.join()
    drain.cancel()
    watch.close()
