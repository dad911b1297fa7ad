"""The process around the app: the socket, the web server's thread, and an orderly end.

On SIGINT or SIGTERM the server stops accepting, running requests get a few seconds and are then
aborted. A second signal aborts at once.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence

import uvicorn

from skippy_mesh.client import EngineClient
from skippy_mesh.errors import SkippyError, UsageError
from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.constraints import GrammarCompiler

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_DRAIN_S = 5
_ABORT_S = 10  # for the last events to reach their clients


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
            problem = self._check_alive()
            if problem is not None and self.problem is None:
                logger.warning("not serving: %s", problem)
            self.problem = problem

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


def serve(
    sock: socket.socket,
    client: EngineClient,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    *,
    model_name: str,
    check_alive: Callable[[], str | None],
    api_keys: Sequence[str],
    why_inexact: str | None,
    metrics: Callable[[], bytes],
    on_reject: Callable[[str], None],
    ready: Callable[[str], str],
) -> None:
    """Serve until a signal, then close ``client``. ``ready(url)`` is printed when requests are
    answered."""
    watch = Watch(check_alive)
    app = create_app(
        client,
        tokenizer,
        grammars,
        model_name=model_name,
        health=lambda: watch.problem,
        api_keys=api_keys,
        exact=why_inexact is None,
        exact_reason=why_inexact,
        metrics=metrics,
        on_reject=on_reject,
    )
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=_DRAIN_S + _ABORT_S
    )
    server = uvicorn.Server(config)
    # Streams end with a reason. What uvicorn cancels would break off, with a traceback.
    drain = threading.Timer(_DRAIN_S, client.close)
    drain.daemon = True

    def stop(_signal: int, _frame: object) -> None:
        if server.should_exit:
            threading.Thread(target=client.close, daemon=True).start()
        else:
            drain.start()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="http")
    thread.start()
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(ready(url), end="", flush=True)
    thread.join()
    drain.cancel()
    client.close()
    watch.close()
