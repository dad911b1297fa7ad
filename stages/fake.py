"""A model made of arithmetic, for tests of everything above the stages: no llama.cpp, no file.

:class:`FakePipeline` keeps the rules of a real stage: one history per lane, positions without gaps,
steps in order, epochs. Its next token is a pure function of the lane's history and parameters, so a
wrong, missing or foreign row changes the text that comes out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

from skippy_mesh.errors import InvalidBatchError, StepOrderError
from skippy_mesh.messages import Copy, Remove, SamplingParams, StepBatch, StepResult

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


def babble(history: Sequence[int], params: SamplingParams) -> int:
    """A letter that depends on every token of ``history`` and, unless greedy, on the seed."""
    seed = params.seed if params.temperature > 0 else 0
    digest = zlib.crc32(",".join(map(str, (seed, *history))).encode())
    return _LETTERS[digest % len(_LETTERS)]


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


class FakePipeline:
    """All stages of a mesh in one object; see :class:`skippy_mesh.engine.Pipeline`.

    ``on_step`` runs before each step and may wait or raise, to stand for a slow or broken stage.
    """

    def __init__(
        self, next_token: NextToken = babble, *, on_step: Callable[[StepBatch], None] | None = None
    ):
        self._next_token = next_token
        self._on_step = on_step
        self._epoch = 0
        self._step_id = 0
        self._params: dict[int, SamplingParams] = {}
        self.histories: dict[int, list[int]] = {}

    def forward(self, batch: StepBatch) -> StepResult:
        if self._on_step is not None:
            self._on_step(batch)
        if batch.epoch > self._epoch:
            self._epoch, self._step_id = batch.epoch, 0
            self.histories, self._params = {}, {}
        if (batch.epoch, batch.step_id) != (self._epoch, self._step_id):
            raise StepOrderError(
                f"expected epoch {self._epoch} step {self._step_id}, "
                f"got epoch {batch.epoch} step {batch.step_id}"
            )
        # Built aside and kept only if the whole batch is sound: a refusal changes nothing.
        histories = {lane: list(tokens) for lane, tokens in self.histories.items()}
        for operation in batch.operations:
            _apply(operation, histories)
        params = {**self._params, **batch.new_lanes}
        sampled = self._run_rows(batch, histories, params)
        for lane in batch.forgotten_lanes:
            params.pop(lane, None)
        self.histories = {lane: tokens for lane, tokens in histories.items() if tokens}
        self._params = params
        self._step_id += 1
        return StepResult(epoch=batch.epoch, step_id=batch.step_id, tokens=sampled)

    def _run_rows(
        self,
        batch: StepBatch,
        histories: dict[int, list[int]],
        params: dict[int, SamplingParams],
    ) -> dict[int, int]:
        sampled: dict[int, int] = {}
        rows = zip(batch.lanes, batch.positions, batch.tokens, batch.samples, strict=True)
        for lane, position, token, samples in rows:
            history = histories.setdefault(lane, [])
            if position != len(history):
                raise InvalidBatchError(
                    f"lane {lane} holds {len(history)} tokens, got position {position}"
                )
            history.append(token)
            if samples:
                if lane not in params or lane in sampled:
                    raise InvalidBatchError(f"lane {lane} cannot sample in this step")
                sampled[lane] = self._sample(history, params[lane])
        return sampled

    def _sample(self, history: Sequence[int], params: SamplingParams) -> int:
        token = self._next_token(history, params)
        return babble(history, params) if token in params.suppressed_ids else token


def _apply(operation: Copy | Remove, histories: dict[int, list[int]]) -> None:
    match operation:
        case Copy(src, dst, p0, p1):
            if p0 != 0 or not p1 <= len(histories.get(src, ())):
                raise InvalidBatchError(f"lane {src} has no positions [{p0}, {p1}) to copy")
            histories[dst] = histories[src][:p1]
        case Remove(lane, p0, p1):
            history = histories.get(lane, [])
            if p1 != -1 and p1 < len(history):
                raise InvalidBatchError(f"removing [{p0}, {p1}) leaves a hole in lane {lane}")
            histories[lane] = history[:p0]


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
