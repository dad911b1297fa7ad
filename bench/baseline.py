"""The old engine: a single lane, one request at a time. What every number is compared with.

Read :meth:`Baseline.generate` first: it is the whole life of a request. Prefill the prompt in
chunks of at most one step's rows, sample, then feed back one token a step until a stop token or the
limit. Others wait in arrival order behind :meth:`Baseline.run`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from coordinator.ceiling import Ceiling, Term
from coordinator.launch import Mesh, is_local, on_own_thread, stage_actors
from coordinator.measured import Loaded
from skippy_mesh.client import Deliver, ReportQueue
from skippy_mesh.config import StageSpec
from skippy_mesh.errors import SkippyError, StageError
from skippy_mesh.health import Pulse
from skippy_mesh.messages import (
    FinishReason,
    Remove,
    Request,
    StepBatch,
    StepReport,
    StepResult,
    TokenEvent,
)
from stages.pipeline import LocalPipeline, RayPipeline, read_pulses, reset_peaks
from stages.worker import StageWorker

logger = logging.getLogger(__name__)

LANE = 0


class Pipeline(Protocol):
    """All stages of one mesh, seen from the engine."""

    def forward(self, batch: StepBatch) -> StepResult:
        """Run ``batch`` on every stage in order and return the sampled tokens."""
        ...


class Baseline:
    """Runs requests one at a time on ``pipeline``.

    ``max_model_len`` bounds prompt plus output in tokens, ``max_rows`` one step's rows, and a
    prompt's chunks are multiples of ``chunk_multiple`` or single rows. Any thread
    may :meth:`submit` and :meth:`abort`; exactly one may :meth:`run` or :meth:`generate`. It is an
    engine's channel, too.
    """

    def __init__(
        self, pipeline: Pipeline, *, max_model_len: int, max_rows: int, chunk_multiple: int = 1
    ):
        self._pipeline = pipeline
        self.max_model_len = max_model_len
        self._max_rows = max_rows
        self._chunk_multiple = chunk_multiple
        self._epoch = 0
        self._step_id = 0
        self._waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._reports = ReportQueue()
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._aborted: set[str] = set()

    def generate(self, request: Request) -> Generator[TokenEvent, None, None]:
        """Complete ``request``, one event per token; the last one has the finish reason.

        Closing the iterator early ends the request and frees its cells.
        """
        request.check_fits(self.max_model_len)
        prompt = request.token_ids
        max_tokens = min(request.max_tokens, self.max_model_len - len(prompt))
        epoch = self._epoch
        try:
            start = 0
            for length in chunk_lengths(
                len(prompt), multiple=self._chunk_multiple, max_rows=self._max_rows
            ):
                if self._is_aborted(request):
                    yield TokenEvent(request_id=request.request_id, finish_reason="abort")
                    return
                chunk = prompt[start : start + length]
                sampled = self._step(request, chunk, start, len(prompt))
                start += length
            for num_output in range(1, max_tokens + 1):
                token = sampled.tokens[LANE]
                reason = self._finish_reason(request, token, is_last=num_output == max_tokens)
                yield TokenEvent(
                    request_id=request.request_id,
                    token_id=token,
                    logprobs=sampled.logprobs.get(LANE),
                    finish_reason=reason,
                )
                if reason:
                    return
                position = len(prompt) + num_output - 1
                sampled = self._step(request, (token,), position, position + 1)
        finally:
            if self._epoch == epoch:
                self._free_lane()

    def submit(self, request: Request) -> None:
        """Queue ``request``; who follows hears of its events."""
        with self._lock:
            self._open.add(request.request_id)
            self._waiting.put(request)

    def abort(self, request_id: str) -> None:
        """End a queued or running request at the next step."""
        with self._lock:
            if request_id in self._open:
                self._aborted.add(request_id)

    def connect(self) -> None:
        """It is there from the start, and does not come back."""

    def follow(self, deliver: Deliver) -> None:
        for report in self._reports:
            deliver(report)

    def run(self) -> None:
        """Serve submitted requests until :meth:`close`; whatever a request meets ends only it."""
        while (request := self._waiting.get()) is not None:
            self._serve(request)
            with self._lock:
                self._open.discard(request.request_id)
                self._aborted.discard(request.request_id)
        self._reports.close()

    def _serve(self, request: Request) -> None:
        try:
            with contextlib.closing(self.generate(request)) as events:
                for event in events:
                    self._reports.put(StepReport((event,)))
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            message = str(error) if isinstance(error, SkippyError) else "internal engine error"
            failure = TokenEvent(
                request_id=request.request_id, finish_reason="error", error=message
            )
            self._reports.put(StepReport((failure,)))

    def close(self) -> None:
        """Abort everything open and let :meth:`run` return."""
        with self._lock:
            self._aborted |= self._open
            self._waiting.put(None)

    def _finish_reason(self, request: Request, token: int, *, is_last: bool) -> FinishReason | None:
        if token in request.stop_token_ids:
            return "stop"
        if is_last:
            return "length"
        return "abort" if self._is_aborted(request) else None

    def _step(
        self, request: Request, tokens: tuple[int, ...], start: int, num_known: int
    ) -> StepResult:
        """Compute ``tokens`` at positions from ``start``; sample if they reach ``num_known``."""
        end = start + len(tokens)
        past = request.sampling.history(request.token_ids, ()) if start == 0 else None
        result = self._forward(
            StepBatch(
                epoch=self._epoch,
                step_id=self._step_id,
                lanes=(LANE,) * len(tokens),
                positions=tuple(range(start, end)),
                tokens=tokens,
                samples=(False,) * (len(tokens) - 1) + (end == num_known,),
                new_lanes={LANE: request.sampling} if start == 0 else {},
                histories={} if past is None else {LANE: past},
            )
        )
        if LANE in result.failed:
            raise StageError(result.failed[LANE])
        return result

    def _free_lane(self) -> None:
        self._forward(
            StepBatch(
                epoch=self._epoch,
                step_id=self._step_id,
                operations=(Remove(LANE),),
                forgotten_lanes=(LANE,),
            )
        )

    def _forward(self, batch: StepBatch) -> StepResult:
        try:
            result = self._pipeline.forward(batch)
        except BaseException:  # an interrupt, too
            # Some stages may have applied the step and others not. A stage that sees a higher
            # epoch empties its memory, so the next request starts clean on all of them.
            self._epoch += 1
            self._step_id = 0
            raise
        self._step_id += 1
        return result

    def _is_aborted(self, request: Request) -> bool:
        with self._lock:
            return request.request_id in self._aborted


def chunk_lengths(length: int, *, multiple: int, max_rows: int) -> tuple[int, ...]:
    """How a prompt of ``length`` tokens goes in: steps of at most ``max_rows`` rows.

    In a recurrent model padding rows would tear a chunk apart, because llama.cpp splits a step into
    sequences of equal length. So chunks are multiples of ``multiple``, and the remainder goes token
    by token, each padded like any decode step.
    """
    if not 1 <= multiple <= max_rows or length < 0:
        raise ValueError(f"cannot cut {length} tokens into steps of {multiple} to {max_rows} rows")
    chunk = max_rows - max_rows % multiple
    num_full, rest = divmod(length - length % multiple, chunk)
    return (chunk,) * num_full + ((rest,) if rest else ()) + (1,) * (length % multiple)


@contextmanager
def baseline_mesh(
    specs: Sequence[StageSpec], *, mesh_name: str = "skippy", max_model_len: int | None = None
) -> Iterator[Mesh]:
    """The stages of ``specs`` under this engine, on a thread that owns what is in this process."""
    with ExitStack() as stack:
        if not is_local(specs):
            actors, infos = stack.enter_context(stage_actors(specs, mesh_name=mesh_name))
            remote = RayPipeline(actors, infos)
            pulses = functools.partial(read_pulses, dict(enumerate(actors)))
            reset = functools.partial(reset_peaks, actors)
            load = functools.partial(_served, remote, pulses, reset, max_model_len)
        else:
            load = functools.partial(_load, specs, max_model_len)
        yield stack.enter_context(on_own_thread(load))


def _load(specs: Sequence[StageSpec], max_model_len: int | None) -> tuple[Mesh, Callable[[], None]]:
    workers = [StageWorker(spec) for spec in specs]
    return _served(
        LocalPipeline(workers),
        lambda: {worker.spec.index: worker.pulse() for worker in workers},
        workers[0].reset_peak,
        max_model_len,
    )


def _served(
    pipeline: LocalPipeline | RayPipeline,
    pulses: Callable[[], Mapping[int, Pulse | Exception]],
    reset: Callable[[], None],
    max_model_len: int | None,
) -> tuple[Mesh, Callable[[], None]]:
    infos = pipeline.infos
    longest = min(infos[0].max_trained_tokens, *(i.num_cells for i in infos))
    engine = Baseline(
        pipeline,
        max_model_len=min(longest, max_model_len or longest),
        max_rows=min(info.rules.max_rows for info in infos),
        chunk_multiple=infos[0].rules.chunk_multiple,
    )

    def serve() -> None:
        engine.run()
        if isinstance(pipeline, LocalPipeline):
            pipeline.close()

    nodes = [platform.node()] * len(infos)
    term = Term(1, "all", "lanes", "baseline")
    limit = Ceiling(term, (term,))
    loaded = Loaded(infos, limit, engine.max_model_len)
    found = Mesh(
        **vars(loaded),
        channel=engine,
        current=lambda: loaded,
        pulses=pulses,
        reset_peaks=reset,
        nodes=nodes,
    )
    return found, serve
