"""The process around the app: the socket, the web server's thread, and an orderly end.

:class:`GatewayServer` is a plain class: an object of the driver where the model is not cut, else an
actor beside it. :func:`serve` is the driver's part of both. On SIGINT or SIGTERM new requests are
refused, and those in the queue; running ones get a few seconds and are then aborted. A second
signal aborts at once.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from skippy_mesh import logs
from skippy_mesh.client import EngineClient
from skippy_mesh.config import METRICS_ALIASES
from skippy_mesh.errors import SkippyError, UsageError
from skippy_mesh.exposition import Family
from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.places import Places
from skippy_mesh.gateway.prefixes import Sharing, new_secret
from skippy_mesh.gateway.readiness import DRAINING, Problem
from skippy_mesh.gateway.refusals import Bounds
from skippy_mesh.gateway.rules import ApiRules
from skippy_mesh.gateway.status import LoadedLike, Served, status
from skippy_mesh.gateway.token_stream import Limits
from skippy_mesh.gateway.watch import Watch
from skippy_mesh.places import AdmissionLimits, Doorkeeper
from skippy_mesh.step_log import StepLog
from skippy_mesh.telemetry import Telemetry
from stages.download import local_model
from stages.grammar_compiler import GrammarCompiler
from stages.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ABORT_S = 10  # for the last events to reach their clients
_POLL_S = 0.1


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name counts by what it stands for."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """What a gateway is told: where to listen, whose model it serves, and how.

    ``build`` are the labels of ``build_info``, ``config`` what ``/status`` shows of the flags.
    ``step_log`` is there already, so that a gateway that is started again goes on in it.
    ``counts_steps`` is false for an engine that keeps no step records. ``metrics_aliases`` are the
    sets of other servers' names on ``/metrics``. ``prefix_secret`` is made with the spec, so that a
    gateway that is started again keeps the namespaces. Told to end, it lets run for ``drain_s``
    what runs. Without a ``log_level`` its process logs as it does already.
    """

    host: str
    port: int
    model_path: str
    model_name: str
    key_digests: tuple[str, ...] = field(default=(), repr=False)
    prefix_secret: bytes = field(default_factory=new_secret, repr=False)
    limits: Limits = field(default_factory=Limits)
    rules: ApiRules = field(default_factory=ApiRules)
    step_log: str | None = None
    counts_steps: bool = True
    metrics_aliases: tuple[str, ...] = METRICS_ALIASES
    build: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    drain_s: float = 5.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    log_level: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches this machine may ask."""
        return not self.key_digests and not is_loopback(self.host)

    def with_limits(self, limits: AdmissionLimits) -> GatewaySpec:
        """As it is once the mesh is there: what it may take is among what ``/status`` shows."""
        resolved = {
            "parallel": limits.ceiling,
            "max_queue": limits.max_queue,
            "max_queue_tokens": limits.max_queue_tokens,
        }
        return replace(self, config={**self.config, **resolved})


class Closes(Protocol):
    def close(self) -> None: ...


class Board(Protocol):
    """Who else wants to know what ``/metrics`` shows, besides those who read it."""

    def start(self, families: Callable[[Sequence[str]], Sequence[Family]]) -> Closes: ...


class GatewayServer:
    """Built cheaply; :meth:`start` does the work, and comes first. Any thread may call the
    methods."""

    def __init__(self, spec: GatewaySpec):
        self._spec = spec
        self._is_draining = False

    def __repr__(self) -> str:
        return f"gateway {self._spec.host}:{self._spec.port}"

    def start(
        self,
        mesh: Served,
        doorkeeper: Doorkeeper,
        sock: socket.socket | None = None,
        board: Board | None = None,
    ) -> str:
        """Answer requests to ``mesh`` from now on; the URL. ``sock`` is listened on already, else
        the gateway opens its own. ``board`` is told what ``/metrics`` shows."""
        spec = self._spec
        if spec.log_level is not None:
            logs.set_up(spec.log_level)
        sock = sock or listen(spec.host, spec.port)
        self._mesh = mesh
        self._loaded: LoadedLike = mesh
        self._bounds = Bounds(mesh.ceiling.binding, mesh.context_bound)
        self._places = Places(doorkeeper)
        self._model_path = str(local_model(spec.model_path))
        self._grammars = GrammarCompiler(self._model_path)
        self._watch = Watch(mesh.pulses, num_stages=len(mesh.infos))
        self._telemetry = self._new_telemetry()
        self._client = EngineClient(
            mesh.channel,
            max_model_len=mesh.max_model_len,
            on_connect=self._learn,
            on_report=self._telemetry.observe,
            on_requests=self._telemetry.observe_requests,
        )
        self._teller = None if board is None else board.start(self._telemetry.families)
        self._app = self._new_app()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                ssl_keyfile=spec.ssl_keyfile,
                ssl_certfile=spec.ssl_certfile,
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=_ABORT_S,
            )
        )
        # A daemon: an actor whose node has gone must not be kept alive by its open connections.
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [sock]}, name="http", daemon=True
        )
        self._thread.start()
        host, port = sock.getsockname()[:2]
        scheme = "http" if spec.ssl_certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def stop(self, drain_s: float | None = None) -> float:
        """Refuse what is new and what is in the queue, let run what runs for ``drain_s``, by
        default the spec's, then abort it; the second call aborts at once. Does not wait: the answer
        is how many seconds it may take."""
        if self._is_draining:
            threading.Thread(target=self._end_engine, name="abort", daemon=True).start()
            return float(_ABORT_S)
        self._is_draining = True
        limit_s = self._spec.drain_s if drain_s is None else drain_s
        threading.Thread(target=self._drain, args=(limit_s,), name="drain", daemon=True).start()
        return limit_s + _ABORT_S

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the gateway has ended, after ``timeout_s`` at most."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._client.close()
        self._grammars.close()
        self._watch.close()
        if self._teller is not None:
            self._teller.close()
        self._telemetry.close()
        return True

    def _new_telemetry(self) -> Telemetry:
        spec, mesh = self._spec, self._mesh
        telemetry = Telemetry(
            model_name=spec.model_name,
            max_model_len=mesh.max_model_len,
            aliases=spec.metrics_aliases,
            build=spec.build,
            step_log=None if spec.step_log is None else StepLog(spec.step_log, is_new=False),
            counts_steps=spec.counts_steps,
            oldest_waiting_s=self._places.oldest_waiting_s,
            is_ready=self._is_ready,
            sights=self._watch.sights,
        )
        _describe(telemetry, mesh)
        return telemetry

    def _learn(self) -> int:
        """What the engine that listens now may do, to whoever has to know; the tokens of a
        request. A stage may have come back with other memory than it had."""
        loaded = self._mesh.current()
        if [info.capacity for info in loaded.infos] != [i.capacity for i in self._loaded.infos]:
            logger.warning("the ceiling is %s now", loaded.ceiling)
            self._places.ceiling = loaded.ceiling.binding.value
            self._bounds.ceiling = loaded.ceiling.binding
            self._bounds.context = loaded.context_bound
            _describe(self._telemetry, loaded)
        self._loaded = loaded
        return loaded.max_model_len

    def _is_ready(self) -> bool | None:
        """What ``/ready`` would answer without a probe; None if it would take one to know."""
        if self._problem() is not None:
            return False
        return self._client.has_passed_within(self._spec.limits.ready_window_s) or None

    def _reset_peaks(self) -> None:
        self._mesh.reset_peaks()
        self._watch.look()

    def _drain(self, limit_s: float) -> None:
        self._app.state.refuse_waiting()
        deadline_s = time.monotonic() + limit_s
        while self._client.num_open and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        # Streams end with a reason. What uvicorn cancels would break off, with a traceback.
        self._end_engine()
        self._server.should_exit = True

    def _end_engine(self) -> None:
        self._watch.stop()
        self._client.close()

    def _problem(self) -> Problem | None:
        if self._is_draining:
            return DRAINING
        if (lost := self._client.problem()) is not None:
            return Problem("stage_unavailable", lost)
        if self._watch.problem is not None:
            return self._watch.problem
        stalled = self._client.stalled()
        return None if stalled is None else Problem("stalled", stalled)

    def _new_app(self) -> FastAPI:
        spec, mesh = self._spec, self._mesh
        return create_app(
            self._client,
            Tokenizer(self._model_path, chat_template=spec.rules.chat_template),
            self._grammars,
            model_name=spec.model_name,
            health=self._problem,
            places=self._places,
            bounds=self._bounds,
            exact=mesh.why_inexact is None,
            exact_reason=mesh.why_inexact,
            key_digests=spec.key_digests,
            limits=spec.limits,
            rules=spec.rules,
            sharing=self._sharing(),
            metrics=self._telemetry.render,
            status=self._status,
            on_reject=self._telemetry.reject,
            on_stall=self._telemetry.stall,
            reset_peaks=self._reset_peaks,
        )

    def _sharing(self) -> Sharing:
        info = self._mesh.infos[-1]
        rule = info.rules.prefix_rule
        if rule == "boundary" and not info.capacity.residents:
            rule = "none"  # there is nowhere to keep a snapshot
        return Sharing(rule, self._spec.prefix_secret)

    def _status(self) -> Mapping[str, object]:
        return status(
            self._loaded,
            nodes=self._mesh.nodes,
            model_name=self._spec.model_name,
            config=self._spec.config,
            problem=self._problem(),
            state=self._telemetry.state,
            epoch=self._telemetry.epoch,
            last_reply_age_s=self._telemetry.last_step_age_s,
            lease_ages_s=self._watch.lease_ages_s(),
            oldest_waiting_s=self._places.oldest_waiting_s(),
            is_open=self._spec.is_open,
        )


def _describe(telemetry: Telemetry, loaded: LoadedLike) -> None:
    telemetry.describe(
        [info.capacity for info in loaded.infos],
        terms=loaded.ceiling.terms,
        binding=loaded.ceiling.binding,
        cell_bytes=[info.cell_bytes for info in loaded.infos],
    )


class Running(Protocol):
    """A gateway as the driver sees it, in this process or another."""

    def stop(self) -> float | None: ...
    def wait(self, timeout_s: float) -> bool: ...


def serve(gateway: Running, ready_text: str) -> None:
    """Say that ``gateway`` answers, and wait for a signal and its end."""
    num_signals = num_heard = 0

    def hear(_signal: int, _frame: object) -> None:
        nonlocal num_signals
        num_signals += 1

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hear)
    print(ready_text, end="", flush=True)
    while not gateway.wait(_POLL_S):
        if num_heard < num_signals:
            num_heard += 1
            gateway.stop()
