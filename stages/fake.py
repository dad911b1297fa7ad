"""A model made of arithmetic, for tests of everything above the stages: no llama.cpp, no file.

:class:`FakePipeline` keeps the rules of real stages: a history per lane, positions without gaps,
steps in order, epochs, room. Its next token is a pure function of the lane's history and
parameters, so a wrong, missing or foreign row changes the text that comes out.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from skippy_mesh.errors import InvalidBatchError, NoRoomError, RequestError, StepOrderError
from skippy_mesh.messages import (
    Copy,
    History,
    Remove,
    SamplingParams,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from skippy_mesh.scheduler.holdings import Holdings
from skippy_mesh.scheduler.memory import CELL_COMPONENTS, Capacity

BOS, EOS, IM_START, IM_END = range(256, 260)
_SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
_TEXTS = {token: text for text, token in _SPECIAL.items()}
_PATTERN = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
_LETTERS = b"abcdefghijklmnopqrstuvwxyz "

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NextToken = Callable[[Sequence[int], SamplingParams], int]
Drawings = dict[int, tuple[Sequence[int], SamplingParams, int]]
"""What each sampling lane draws its next token from, and how many the request had before, where
that counts."""


def babble(history: Sequence[int], params: SamplingParams) -> int:
    """A letter that depends on every token of ``history`` and, unless greedy, on the seed."""
    seed = params.seed if params.temperature > 0 else 0
    digest = zlib.crc32(array("q", history).tobytes(), seed % 2**32)
    return _LETTERS[digest % len(_LETTERS)]


def certain(token: int, count: int) -> TokenLogprobs:
    """Half the chance for ``token``, a quarter for the one below, and so on."""
    chances = [(token - place, -math.log(2) * (place + 1)) for place in range(count)]
    return TokenLogprobs(-math.log(2), tuple(chances))


def recite(tokens: Sequence[int]) -> NextToken:
    """A model that knows one answer by heart: ``tokens``, then the end of the turn.

    It continues the longest beginning of the answer that the history ends with, which makes it a
    function of the history alone.
    """
    answer = (*tokens, IM_END)

    def next_token(history: Sequence[int], params: SamplingParams) -> int:
        for known in range(min(len(tokens), len(history)), 0, -1):
            if tuple(history[-known:]) == answer[:known]:
                return answer[known]
        return answer[0]

    return next_token


class FakeClock:
    """Time that passes only when a fake stage works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeStage:
    """The memory of one stage: a history per lane, positions without gaps, steps in order."""

    def __init__(self, capacity: Capacity | None = None):
        self._capacity = capacity
        self._epoch = 0
        self._step_id = 0
        self._params: dict[int, SamplingParams] = {}
        self._pasts: dict[int, tuple[History, int]] = {}  # and how often the lane has drawn
        self._holdings = Holdings()
        self.histories: dict[int, list[int]] = {}

    def apply(self, batch: StepBatch) -> Drawings:
        """Run ``batch``, or refuse it and change nothing."""
        if batch.epoch > self._epoch:
            self._epoch, self._step_id = batch.epoch, 0
            self.histories, self._params, self._pasts = {}, {}, {}
            self._holdings = Holdings()
        if (batch.epoch, batch.step_id) != (self._epoch, self._step_id):
            raise StepOrderError(
                f"expected epoch {self._epoch} step {self._step_id}, "
                f"got epoch {batch.epoch} step {batch.step_id}"
            )
        # Built aside and kept only if the whole batch is sound.
        histories, holdings = dict(self.histories), copy.deepcopy(self._holdings)
        for operation in batch.operations:
            self._check_whole(operation, histories)
            _apply(operation, histories, holdings)
        params = {**self._params, **batch.new_lanes}
        pasts = {lane: p for lane, p in self._pasts.items() if lane not in batch.new_lanes}
        pasts |= {lane: (past, 0) for lane, past in batch.histories.items()}
        drawings = _run_rows(batch, histories, params, pasts)
        for lane, num_rows in Counter(batch.lanes).items():
            holdings.grow(lane, num_rows)
        histories = {lane: tokens for lane, tokens in histories.items() if tokens}
        self._check_room(histories, holdings)
        self.histories, self._holdings = histories, holdings
        self._params = {lane: p for lane, p in params.items() if lane not in batch.forgotten_lanes}
        self._pasts = pasts
        self._step_id += 1
        return drawings

    def _check_whole(
        self, operation: Copy | Remove, histories: Mapping[int, Sequence[int]]
    ) -> None:
        """Recurrent memory has the state of its last position and no other."""
        if isinstance(operation, Copy) and self._capacity and self._capacity.recurrent:
            end = len(histories.get(operation.src, ()))
            if operation.p1 != end:
                raise InvalidBatchError(f"lane {operation.src} has the state of {end - 1} alone")

    def _check_room(self, histories: Mapping[int, Sequence[int]], holdings: Holdings) -> None:
        if self._capacity is None:
            return
        num_ids = self._capacity.lanes + self._capacity.residents
        if any(lane >= num_ids for lane in histories):
            raise InvalidBatchError(f"a lane is not in [0, {num_ids})")
        for name, size in self._capacity.by_component().items():
            need = holdings.num_used if name in CELL_COMPONENTS else len(histories)
            if need > (num_ids if name == "lanes" else size):
                raise NoRoomError(f"{need} of {name} are needed and there are {size}")


class FakePipeline:
    """All stages of a mesh in one object; see :class:`skippy_mesh.engine.Pipeline`.

    Stage 0 runs a batch when it is submitted and the others when somebody asks for its answer, so
    any number of batches may be on their way. There is a stage for each of ``capacities``.
    ``on_step`` runs before each step and may wait or raise, to stand for a slow or broken mesh;
    ``on_stage`` likewise before each stage's part in it; ``on_answer`` may change what is answered,
    ``on_restore`` says whether lost stages are there again.
    A batch takes every stage ``cost_s`` seconds of ``clock``.
    """

    def __init__(
        self,
        next_token: NextToken = babble,
        *,
        capacities: Sequence[Capacity | None] = (None,),
        on_step: Callable[[StepBatch], None] = lambda _batch: None,
        on_stage: Callable[[int, StepBatch], None] = lambda _stage, _batch: None,
        on_answer: Callable[[StepResult], StepResult] = lambda result: result,
        on_restore: Callable[[], bool] = lambda: True,
        clock: FakeClock | None = None,
        cost_s: Callable[[StepBatch], float] = lambda _batch: 0.0,
    ):
        self._next_token = next_token
        self._on_step = on_step
        self._on_stage = on_stage
        self._on_answer = on_answer
        self._cost_s = cost_s
        self._on_restore = on_restore
        self._capacities = capacities
        self._stages = [FakeStage(capacity) for capacity in capacities]
        self._free_at_s = [0.0] * len(capacities)
        self._underway: deque[FakePending] = deque()
        self.clock = clock or FakeClock()
        self.busy_s = [0.0] * len(capacities)

    @property
    def histories(self) -> dict[int, list[int]]:
        """What the last stage holds."""
        return self._stages[-1].histories

    def submit(self, batch: StepBatch) -> FakePending:
        pending = FakePending(self, batch)
        pending.attempt(lambda: self._on_step(batch))
        self._run_stage(0, pending)
        self.clock.now_s = max(self.clock.now_s, pending.ended_s)
        self._underway.append(pending)
        return pending

    def forward(self, batch: StepBatch) -> StepResult:
        return self.submit(batch).result()

    def lane_ends(self) -> list[Mapping[int, int]]:
        self.advance(None)
        return [
            {lane: len(tokens) for lane, tokens in stage.histories.items()}
            for stage in self._stages
        ]

    def restore(self, timeout_s: float) -> bool:
        return self._on_restore()

    def replace_stage(self, index: int) -> None:
        """The stage is another now, empty and in no epoch."""
        self._stages[index] = FakeStage(self._capacities[index])

    def advance(self, last: FakePending | None) -> None:
        """Let the later stages run what is underway, up to and with ``last``."""
        while self._underway and (last is None or last in self._underway):
            pending = self._underway.popleft()
            for index in range(1, len(self._stages)):
                self._run_stage(index, pending)
            pending.attempt(functools.partial(self._answer, pending))

    def _run_stage(self, index: int, pending: FakePending) -> None:
        batch = pending.batch

        def run() -> None:
            self._on_stage(index, batch)
            pending.drawings = self._stages[index].apply(batch)

        pending.attempt(run)
        if pending.error is not None:
            return
        cost_s = self._cost_s(batch)
        pending.ended_s = max(pending.ended_s, self._free_at_s[index]) + cost_s
        self._free_at_s[index] = pending.ended_s
        self.busy_s[index] += cost_s

    def _answer(self, pending: FakePending) -> None:
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        for lane, (history, params, num_outputs) in pending.drawings.items():
            tokens[lane] = self._sample(history, params, num_outputs)
            if params.num_logprobs is not None:
                logprobs[lane] = certain(tokens[lane], params.num_logprobs)
        batch = pending.batch
        pending.answer = self._on_answer(
            StepResult(epoch=batch.epoch, step_id=batch.step_id, tokens=tokens, logprobs=logprobs)
        )

    def _sample(self, history: Sequence[int], params: SamplingParams, num_outputs: int) -> int:
        token = self._next_token(history, params)
        forbidden = {*params.suppressed_ids}
        if num_outputs < params.min_tokens:
            forbidden.update(params.ending_ids)
        return babble(history, params) if token in forbidden else token


class FakePending:
    """A batch on its way through a :class:`FakePipeline`."""

    def __init__(self, pipeline: FakePipeline, batch: StepBatch):
        self._pipeline = pipeline
        self.batch = batch
        self.drawings: Drawings = {}
        self.answer: StepResult | None = None
        self.error: Exception | None = None
        self.ended_s = 0.0

    def attempt(self, action: Callable[[], None]) -> None:
        """Unless something failed before: what ``action`` raises is the answer."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    def result(self) -> StepResult:
        self._pipeline.advance(self)
        clock = self._pipeline.clock
        clock.now_s = max(clock.now_s, self.ended_s)
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer


def _run_rows(
    batch: StepBatch,
    histories: dict[int, list[int]],
    params: Mapping[int, SamplingParams],
    pasts: dict[int, tuple[History, int]],
) -> Drawings:
    """Extend ``histories`` by the rows of ``batch``, each list replaced by a longer one."""
    drawings: Drawings = {}
    extended: set[int] = set()
    rows = zip(batch.lanes, batch.positions, batch.tokens, batch.samples, strict=True)
    for lane, position, token, samples in rows:
        if lane not in extended:
            histories[lane] = list(histories.get(lane, ()))
            extended.add(lane)
        history = histories[lane]
        if position != len(history):
            raise InvalidBatchError(
                f"lane {lane} holds {len(history)} tokens, got position {position}"
            )
        history.append(token)
        if samples:
            if lane not in params or lane in drawings:
                raise InvalidBatchError(f"lane {lane} cannot sample in this step")
            num_outputs = 0
            if params[lane].needs_history:
                past, num_drawn = pasts[lane]
                num_outputs = _outputs_since(history, past, num_drawn)
                pasts[lane] = past, num_drawn + 1
            drawings[lane] = (history, params[lane], num_outputs)
    return drawings


def _outputs_since(history: Sequence[int], past: History, num_drawn: int) -> int:
    """How many tokens were generated, if the sampler's ``past`` and its draws are the history."""
    prompt, outputs = history[: past.num_prompt], history[past.num_prompt :]
    is_right = (
        prompt[len(prompt) - len(past.recent_prompt) :] == list(past.recent_prompt)
        and outputs[: len(past.outputs)] == list(past.outputs)
        and len(outputs) == len(past.outputs) + num_drawn
    )
    if not is_right:
        raise InvalidBatchError(f"a sampler's past {past} and {num_drawn} draws are not {history}")
    return len(outputs)


def _apply(operation: Copy | Remove, histories: dict[int, list[int]], holdings: Holdings) -> None:
    match operation:
        case Copy(src, dst, p0, p1):
            if p0 != 0 or not p1 <= len(histories.get(src, ())) or histories.get(dst):
                raise InvalidBatchError(
                    f"cannot copy positions [{p0}, {p1}) of lane {src} to lane {dst}"
                )
            histories[dst] = histories[src][:p1]
            holdings.share(src, dst, p1)
        case Remove(lane, p0, p1):
            history = histories.get(lane, [])
            if p1 != -1 and p1 < len(history):
                raise InvalidBatchError(f"removing [{p0}, {p1}) leaves a hole in lane {lane}")
            histories[lane] = history[:p0]
            holdings.cut(lane, len(histories[lane]))


class FakeTokenizer:
    """Bytes are ids 0 to 255; four control tokens follow. ``adds_bos`` is the model's wish."""

    num_tokens = 260
    max_trained_tokens = 4096
    eog_ids = frozenset({EOS, IM_END})
    special_texts = tuple(_SPECIAL)
    bos_text = "<s>"
    eos_text = "</s>"

    def __init__(self, *, chat_template: str | None = CHATML, adds_bos: bool = True):
        self.chat_template = chat_template
        self._adds_bos = adds_bos

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = [BOS] if add_special and self._adds_bos else []
        for part in _PATTERN.split(text) if parse_special else [text]:
            if parse_special and part in _SPECIAL:
                ids.append(_SPECIAL[part])
            else:
                ids.extend(part.encode())
        return ids

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        if not 0 <= token_id < self.num_tokens:
            raise ValueError(f"token id {token_id} is not in [0, {self.num_tokens})")
        if token_id < 256:
            return bytes([token_id])
        return _TEXTS[token_id].encode() if special else b""


class FakeGrammars:
    """Refuses what holds the word ``bad``; remembers what it was given."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def compile(self, kind: str, text: str) -> str:
        self.asked.append((kind, text))
        if "bad" in text:
            raise RequestError("the grammar cannot be used: bad", code="invalid_grammar")
        return text
