"""The gateway's end of the engine: submit requests, get every step's report, hand out its events.

The engine may be a thread of this process or an actor elsewhere; a :class:`Channel` hides which.
When it dies and is started again, all that is open is submitted once more with what it has
generated, and goes on where it was.
How many may be submitted is not decided here: that is admission's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from skippy_mesh.errors import SkippyError, StageChangedError, StageLostError
from skippy_mesh.health import STUCK_S
from skippy_mesh.messages import FinishReason, Request, StageLoss, StepReport, TokenEvent
from skippy_mesh.times import FirstToken, RequestEnd, RequestNews, RequestTimes

logger = logging.getLogger(__name__)

_YIELD_S = 50e-6
"""Long enough for an event loop that was just woken to take Python's lock. Whoever delivers would
else keep it, and clients would wait for their tokens until the next step has begun."""
MAX_LOSSES_ALONE = 2
"""An engine that dies so often while a request runs alone, without a token, dies of it."""
END_S = 15.0  # an engine that hangs must not keep its server from ending
Sink = Callable[[TokenEvent], None]
Deliver = Callable[[StepReport], None]
Shown = TypeVar("Shown")


class Channel(Protocol):
    """An engine, from any thread of any process."""

    def connect(self) -> None:
        """Wait until an engine listens. It knows no request yet, whatever was submitted before;
        :class:`SkippyError` if there will be none any more."""
        ...

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def close(self) -> None:
        """Abort everything and end :meth:`follow`."""
        ...

    def follow(self, deliver: Deliver) -> None:
        """``deliver`` each report, on whichever thread, until the engine ends;
        :class:`StageLostError` if it is lost, after which one may :meth:`connect` again."""
        ...


class ReportQueue:
    """Reports on their way from an engine to who reads them, or follows them."""

    def __init__(self) -> None:
        self._deliver: Deliver | None = None
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[StepReport | SkippyError | None] = queue.SimpleQueue()

    def put(self, report: StepReport) -> None:
        with self._lock:
            if self._deliver is None:
                self._queue.put(report)
                return
            self._deliver(report)

    def close(self) -> None:
        self._queue.put(None)

    def fail(self, error: SkippyError) -> None:
        """Raise ``error`` behind the last report."""
        self._queue.put(error)

    def follow(self, deliver: Deliver) -> None:
        """``deliver`` what is here, and then each report where it is :meth:`put`, without a thread
        in between. Returns when it is closed."""
        with self._lock:
            while not self._queue.empty():
                report = self._queue.get()
                if not isinstance(report, StepReport):
                    self._queue.put(report)  # the last, below
                    break
                deliver(report)
            self._deliver = deliver
        for report in self:
            raise AssertionError(f"{report} came past who follows")

    def __iter__(self) -> Iterator[StepReport]:
        while (report := self._queue.get()) is not None:
            if isinstance(report, SkippyError):
                raise report
            yield report


class _Receiver:
    def __init__(
        self,
        request: Request,
        sink: Sink,
        on_start: Callable[[], object] | None,
        times: RequestTimes,
    ):
        self._sink = sink
        self.times = times
        self.end_reason: FinishReason | None = None  # why it was aborted
        self.has_started = False
        self.num_losses_alone = 0
        self._request = request
        self._outputs: list[int] = []
        self._on_start = on_start
        self._aborted_s: float | None = None

    @property
    def request(self) -> Request:
        """What an engine that knows nothing must be asked for."""
        return replace(self._request, outputs=tuple(self._outputs), was_running=self.has_started)

    def abort(self, reason: FinishReason, now_s: float) -> None:
        if self.end_reason is None:
            self.end_reason, self._aborted_s = reason, now_s

    def end(self, engine_problem: str) -> TokenEvent | None:
        """Its last event, if it must not run again on the engine that comes."""
        request_id = self._request.request_id
        if self.end_reason is not None:
            return TokenEvent(request_id=request_id, finish_reason="abort")
        if self.num_losses_alone >= MAX_LOSSES_ALONE:
            error = f"{engine_problem}, each time this request ran alone"
            return TokenEvent(request_id=request_id, finish_reason="error", error=error)
        return None

    def start(self, now_s: float) -> None:
        self.has_started = True
        self.times.start(now_s)
        on_start, self._on_start = self._on_start, None
        if on_start is not None:
            self._guarded(on_start)

    def take(self, event: TokenEvent, now_s: float, news: RequestNews) -> None:
        if event.token_id is not None:
            self._outputs.append(event.token_id)
            self.num_losses_alone = 0
            self.start(now_s)  # who ends without having run was not served
            self._count_token(event, now_s, news)
        if event.finish_reason is not None:
            news.ended.append(self._ended(event, now_s))

    def pass_on(self, event: TokenEvent) -> None:
        self._guarded(lambda: self._sink(event))

    def _guarded(self, call: Callable[[], object]) -> None:
        """One receiver's failure must not become the others'."""
        try:
            call()
        except Exception:
            logger.exception("the receiver of request %s failed", self._request.request_id)

    def _count_token(self, event: TokenEvent, now_s: float, news: RequestNews) -> None:
        times = self.times
        if times.last_s is not None:
            news.gaps_s.append(now_s - times.last_s)
            times.token(now_s)
            return
        times.token(now_s)
        num_prompt = len(self._request.token_ids)
        after_s, prefill_s = times.first_token_s or 0.0, times.prefill_s or 0.0
        news.firsts.append(FirstToken(after_s, prefill_s, num_prompt, event.num_cached))

    def _ended(self, event: TokenEvent, now_s: float) -> RequestEnd:
        cancelled_s = self._aborted_s if event.finish_reason in ("abort", "timeout") else None
        return RequestEnd(
            times=self.times,
            e2e_s=now_s - self.times.submitted_s,
            cancel_s=None if cancelled_s is None else now_s - cancelled_s,
            num_prompt=len(self._request.token_ids),
            num_output=len(self._outputs),
            num_preemptions=event.num_preemptions,
        )


class EngineClient:
    """Submits to ``channel`` and passes each event to its request's sink, on whichever thread the
    channel delivers it.

    ``on_connect`` is told of each engine that listens and says how many tokens a request may have
    there. ``on_report`` gets every report on the same thread, then ``on_requests`` what it meant to
    the requests it names, before the events of one that ends a request and behind all others; the
    last report ends what is open and knows no state. Any thread may call the methods.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        max_model_len: int,
        on_connect: Callable[[], int] | None = None,
        on_report: Callable[[StepReport], None] | None = None,
        on_requests: Callable[[RequestNews], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_model_len = max_model_len
        self._channel = channel
        self._on_connect = on_connect
        self._on_report = on_report
        self._on_requests = on_requests
        self._receivers: dict[str, _Receiver] = {}
        self._is_connected = False
        self._suspects: list[str] = []  # run alone, in this order, until each has had an event
        self._lock = threading.Lock()
        self._end: str | None = None
        self._lost: str | None = None
        self._clock = clock
        self._progress_s = clock()
        self._last_token_s: float | None = None
        self._thread = threading.Thread(target=self._read, name="reports", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        return len(self._receivers)

    def submit(
        self, request: Request, sink: Sink, *, on_start: Callable[[], object] | None = None
    ) -> RequestTimes:
        """Run ``request``. ``sink`` gets its events, and ``on_start`` is called when it leaves the
        queue, with its first token at the latest; neither may block. The times go on running."""
        request.check_fits(self.max_model_len)
        with self._lock:
            if self._end is not None:
                raise SkippyError(self._end)
            if request.request_id in self._receivers:
                raise SkippyError(f"request id {request.request_id} is already open")
            times = RequestTimes(self._clock())
            if not self._receivers:
                self._progress_s = times.submitted_s
            # Under the lock, or an abort could reach the engine first and be forgotten.
            if self._is_connected:
                self._channel.submit(request)
            self._receivers[request.request_id] = _Receiver(request, sink, on_start, times)
        return times

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End a request within one step, with ``reason``; False if it is not open."""
        with self._lock:
            receiver = self._receivers.get(request_id)
            if receiver is None:
                return False
            receiver.abort(reason, self._clock())
            if self._is_connected:
                self._channel.abort(request_id)
        return True

    def has_passed_within(self, window_s: float) -> bool:
        """Whether a token came through all stages so short a time ago."""
        last_s = self._last_token_s
        return last_s is not None and self._clock() - last_s <= window_s

    def problem(self) -> str | None:
        """Why no request can succeed any more: the engine is lost. None when it was closed."""
        return self._lost

    def stalled(self) -> str | None:
        """How the engine, which has work, does not get on; None while it does."""
        silent_s = self._clock() - self._progress_s
        if self._end is None and self._receivers and silent_s > STUCK_S:
            return f"no step has ended for {silent_s:.0f} s, with {self.num_open} requests open"
        return None

    def generate(
        self, request: Request, events: queue.SimpleQueue[TokenEvent] | None = None
    ) -> Iterator[TokenEvent]:
        """The events of one request; leaving early aborts it. Whoever gives ``events`` may put a
        last one there, even from a signal's handler."""
        events = events or queue.SimpleQueue()
        self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def close(self) -> None:
        """Abort everything open; returns when every request has had its last event."""
        with self._lock:
            self._end = self._end or "the engine is shutting down"
        self._channel.close()
        self._thread.join(END_S)

    def _read(self) -> None:
        reason = "the engine is shutting down"
        try:
            self._serve()
        except SkippyError as error:
            self._lost = reason = str(error)
        except Exception:
            logger.exception("the engine is lost")
            self._lost = reason = "the engine is lost"
        with self._lock:
            self._end = reason
            left = list(self._receivers)
        is_lost = self._lost is not None
        ends = [
            TokenEvent(request_id=name, finish_reason="error", error=reason, is_unavailable=is_lost)
            for name in left
        ]
        self._deliver(StepReport(tuple(ends)))

    def _serve(self) -> None:
        """Until the engine ends, or is lost and does not come back."""
        loss: StageLostError | None = None
        while True:
            self._channel.connect()
            try:
                if self._on_connect is not None:
                    self.max_model_len = self._on_connect()
                self._resume(loss)
                self._channel.follow(self._hear)
                return
            except StageLostError as error:
                logger.warning("%s; what is open is submitted to the next engine", error)
                loss = error
            with self._lock:
                if self._is_connected and self._suspects:
                    self._receivers[self._suspects[0]].num_losses_alone += 1
                self._is_connected = False

    def _resume(self, loss: StageLostError | None) -> None:
        """Submit all that is open: first who ran when the engine was lost, and of those who seems
        to have been the reason."""
        with self._lock:
            ends = {}
            if loss is not None:
                ends = {name: each.end(str(loss)) for name, each in self._receivers.items()}
            left = [name for name in self._receivers if ends.get(name) is None]
            left.sort(key=lambda name: -self._receivers[name].num_losses_alone)
            self._suspects = [name for name in left if self._receivers[name].has_started]
            fresh = [name for name in left if not self._receivers[name].has_started]
            for name in (*self._suspects, *fresh):
                self._channel.submit(self._receivers[name].request)
                # It may have been aborted before the first engine was there.
                if self._receivers[name].end_reason is not None:
                    self._channel.abort(name)
            self._is_connected = True
            self._progress_s = self._clock()
            if self._end is not None:  # the engine that was told so is gone
                self._channel.close()
        if loss is not None:
            events = tuple(end for end in ends.values() if end is not None)
            # A stage that has changed was lost before, and the engine over it has said so.
            is_told = isinstance(loss, StageChangedError)
            lost = None if is_told else StageLoss(loss.stage, len(self._suspects))
            self._deliver(StepReport(events, loss=lost))

    def _hear(self, report: StepReport) -> None:
        self._progress_s = self._clock()
        self._deliver(report)

    def _deliver(self, report: StepReport) -> None:
        now_s = self._clock()
        report = self._with_reasons(report)
        # Told when their first step is answered, they left the queue when it began.
        step_s = 0.0 if report.record is None else report.record.step_s
        for request_id in report.admitted:
            with self._lock:
                receiver = self._receivers.get(request_id)
            if receiver is not None:
                receiver.start(now_s - step_s)
        news = RequestNews()
        taken = [(self._take(event, now_s, news), event) for event in report.events]
        if news.ended:  # whoever has a whole reply finds it counted
            self._observe(report, news)
            _pass_on(taken)
        else:
            _pass_on(taken)
            self._observe(report, news)

    def _observe(self, report: StepReport, news: RequestNews) -> None:
        _show(self._on_report, report)
        _show(self._on_requests, news)

    def _with_reasons(self, report: StepReport) -> StepReport:
        """``report`` with the reasons that the engine, told to abort, was not told."""
        if all(event.finish_reason != "abort" for event in report.events):
            return report
        with self._lock:
            return replace(report, events=tuple(map(self._with_reason, report.events)))

    def _with_reason(self, event: TokenEvent) -> TokenEvent:
        receiver = self._receivers.get(event.request_id)
        if event.finish_reason != "abort" or receiver is None or receiver.end_reason is None:
            return event
        return replace(event, finish_reason=receiver.end_reason)

    def _take(self, event: TokenEvent, now_s: float, news: RequestNews) -> _Receiver | None:
        """Whose ``event`` is, None if nobody's any more; what it means to that request is in
        ``news`` from now on."""
        with self._lock:
            receiver = self._receivers.get(event.request_id)
            if event.finish_reason is not None:
                self._receivers.pop(event.request_id, None)
            if event.request_id in self._suspects:
                self._suspects.remove(event.request_id)
        if event.token_id is not None:
            self._last_token_s = now_s
        if receiver is not None:
            receiver.take(event, now_s, news)
        return receiver


def _pass_on(taken: Sequence[tuple[_Receiver | None, TokenEvent]]) -> None:
    for receiver, event in taken:
        if receiver is not None:
            receiver.pass_on(event)
    if taken:
        time.sleep(_YIELD_S)


def _show(observer: Callable[[Shown], None] | None, shown: Shown) -> None:
    if observer is None:
        return
    try:
        observer(shown)
    except Exception:  # who only watches must not end requests
        logger.exception("the observer of reports failed")
