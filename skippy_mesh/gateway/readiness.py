"""Whether this server can serve: said at once, from what is known; readiness is tried with a token.

Health is what the stages say of themselves. Readiness asks for more: that a token has come through
all of them of late. Where nobody has asked for one, a probe does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from starlette.responses import JSONResponse, Response

from skippy_mesh.client import EngineClient
from skippy_mesh.errors import SkippyError
from skippy_mesh.gateway.errors import ApiError, unavailable
from skippy_mesh.messages import Request, SamplingParams, TokenEvent

_PROBE_TOKEN = 0  # every vocabulary has it
_PROBE_S = 10.0
_REASONS = {"loading": "loading", "draining": "draining"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why nothing is served: ``code`` is that of the HTTP error, ``message`` fit for a client;
    ``stage`` is the one to blame, if one is."""

    code: Literal["loading", "draining", "stage_unavailable", "stalled"]
    message: str
    stage: int | None = None

    def error(self) -> ApiError:
        return unavailable(self.code, self.message)


LOADING = Problem("loading", "Loading model")
DRAINING = Problem("draining", "this server is about to end; ask another one")


class Readiness:
    """``problem`` answers at once, None when the mesh can serve. A token that is older than
    ``window_s`` proves nothing."""

    def __init__(
        self,
        problem: Callable[[], Problem | None],
        engine: EngineClient,
        *,
        exact: bool,
        exact_reason: str | None,
        window_s: float,
    ):
        self._problem = problem
        self._engine = engine
        self._window_s = window_s
        self._probe: asyncio.Task[bool] | None = None
        self._num_probes = itertools.count()
        self._healthy: dict[str, object] = {"status": "ok", "exact": exact}
        if exact_reason is not None:
            self._healthy["exact_reason"] = exact_reason

    def refuse(self) -> None:
        """Raises what a client is told while nothing is served."""
        if (problem := self._problem()) is not None:
            raise problem.error()

    async def health(self) -> Response:
        self.refuse()
        return JSONResponse(self._healthy)

    async def ready(self) -> Response:
        if (problem := self._problem()) is not None:
            reason = _REASONS.get(problem.code, "stage_down")
            return not_ready(reason, problem.stage)
        if not (self._engine.has_passed_within(self._window_s) or await self._has_passed()):
            return not_ready("probe_failed", None)
        return JSONResponse({"status": "ready"})

    async def _has_passed(self) -> bool:
        """Whether a token comes through now; one probe at a time, whoever asks."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._try())
        try:
            return await asyncio.wait_for(asyncio.shield(self._probe), _PROBE_S)
        except TimeoutError:
            return False

    async def _try(self) -> bool:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()

        def hear(event: TokenEvent) -> None:
            if event.finish_reason is not None:
                loop.call_soon_threadsafe(ended.set_result, event.finish_reason != "error")

        request = Request(
            request_id=f"probe#{next(self._num_probes)}",  # no client's: of theirs none has a #
            token_ids=(_PROBE_TOKEN,),
            max_tokens=1,
            shares_prefix=False,
            sampling=SamplingParams(temperature=0.0),
        )
        try:
            self._engine.submit(request, hear)
        except SkippyError:
            return False
        return await ended


def not_ready(reason: str, stage: int | None) -> Response:
    """What ``/ready`` says while this server is not."""
    body: dict[str, object] = {"status": "not_ready", "reason": reason}
    if stage is not None:
        body["stage"] = stage
    return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})
