"""One stage of a mesh: a plain class that runs StepBatches on its slice of the model.

The same class runs inside a Ray actor and inside one process (``pipeline.py``). Steps are numbered:
a stage applies each exactly once and in order, and a higher epoch empties it first, so after any
failure the engine starts all stages afresh by raising the epoch.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skippy_mesh.config import ContextConfig, StageSpec, StepRules
from skippy_mesh.errors import InvalidBatchError, StageLostError, StepOrderError
from skippy_mesh.health import Loading, Pulse
from skippy_mesh.messages import StageTime, StepBatch, StepResult
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.sizes import process_bytes, reset_peak
from skippy_mesh.wire import Hidden, decode_activations, decode_step, encode_activations
from stages.batch import Floats, Rows
from stages.context import StageContext
from stages.embedding import Embedding
from stages.gguf_file import ModelFile
from stages.part import Part, new_context, part_of, rules_of
from stages.profile import Profile
from stages.proof import Proof
from stages.sampling import Drawn, Sampler
from stages.slices import cached_slice
from stages.tokenizer import Tokenizer
from stages.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """What a loaded stage says of itself; a snapshot, never read from the running context.

    ``capacity`` is what requests can use, ``planned`` what was asked for: less came out where
    memory was short. ``context_bytes`` are what the context took, ``planned_context_bytes`` what
    the plan charged for the one asked for, None without a plan; of which ``cell_bytes`` is what a
    cell of each store takes, empty without a plan. ``rules`` are what a step may hold.
    ``why_inexact`` is None when the self-test proved that company does not change a row's bits.
    ``load_s`` is all of :meth:`StageWorker.load`; for ``self_test_s`` of it there was nothing left
    to do but wait for the self-test, or for the digest that its verdict is kept under.
    """

    index: int
    num_stages: int
    first_layer: int
    end_layer: int
    num_cells: int
    max_trained_tokens: int
    capacity: Capacity
    planned: Capacity
    rules: StepRules
    kv_type: str
    weight_bytes: int
    context_bytes: int
    planned_context_bytes: int | None
    cell_bytes: Mapping[str, int]
    profile: Profile
    why_inexact: str | None
    process_id: int
    load_s: float
    self_test_s: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds inside ``step`` in all, and the part of them inside ``llama_decode``."""

    busy_s: float
    native_s: float


class StageWorker:
    """Built cheaply; :meth:`load` does the work, on the thread that will run the steps."""

    def __init__(self, spec: StageSpec):
        self.spec = spec
        self._weights: Weights | None = None
        self._context: StageContext | None = None
        self._embedding: Embedding | None = None
        self._sampler = Sampler()
        self._epoch = -1
        self._next_step = 0
        self._info: StageInfo | None = None
        self._loading = Loading()
        self._busy_s = 0.0
        self._ended_s = 0.0
        self._step_began_s: float | None = None

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"stage {spec.index}/{spec.num_stages} "
            f"layers {spec.first_layer}:{spec.end_layer} epoch {self._epoch}"
        )

    def load(self) -> StageInfo:
        """Cut the slice if the cache lacks it, load it, prove it, and measure. A stage that is
        loaded has done that."""
        if self._info is not None:
            return self._info
        started = time.perf_counter()
        part = part_of(self.spec, self._note_fetched)
        spec = part.spec
        with Proof(part) as proof:
            self._loading = Loading("slicing")
            path = cached_slice(part.model, spec.first_layer, spec.end_layer, self._note_bytes)
            self._loading = Loading("loading")
            weights = self._weights = Weights(path, part.profile, spec.context.load_mode)
            proof.lend(weights)
            self._loading = Loading("testing")
            before = time.perf_counter()
            reason = proof.why_inexact()
            self_test_s = time.perf_counter() - before
        self._loading = Loading("loading")
        # Not beside the test: what it adds to this process's memory is measured.
        self._context = new_context(part, weights, spec.context, is_last=spec.is_last)
        self._take_ends(part.model)
        load_s = time.perf_counter() - started
        self._info = _describe(
            part, self._context, self.spec.context, reason, load_s=load_s, self_test_s=self_test_s
        )
        return self._info

    def _take_ends(self, model: ModelFile) -> None:
        """What only the first and the last stage have."""
        if self.spec.is_first:
            self._embedding = Embedding(model)
        if self.spec.is_last:
            # A slice has no vocabulary, and few requests come with a grammar.
            tokenizer = functools.cache(lambda: Tokenizer(str(model.paths[0])))
            num_cells = self._loaded().num_cells
            self._sampler = Sampler(max_tokens=num_cells, tokenizer=tokenizer)

    def forward(self, batch: StepBatch, hidden: Hidden | None = None) -> StepResult | Hidden | None:
        """Run ``batch``: its result on the last stage, on any other the rows for the next stage,
        None for a batch without rows."""
        started_s = time.perf_counter()
        num_decodes = self._loaded().num_decodes
        output = self.compute(batch, None if hidden is None else hidden.rows)
        drawn = self.sample(batch, output) if self.spec.is_last else Drawn()
        ended_s = time.perf_counter()
        self._busy_s += ended_s - started_s
        time_here = StageTime(
            ended_s - started_s,
            started_s - (self._ended_s or started_s),
            self._loaded().num_decodes - num_decodes,
            0 if self.spec.is_last or output is None else output.nbytes,
        )
        self._ended_s = ended_s
        stages = (*(hidden.stages if hidden else ()), time_here)
        if self.spec.is_last:
            return StepResult(
                epoch=batch.epoch,
                step_id=batch.step_id,
                tokens=drawn.tokens,
                failed=drawn.failed,
                logprobs=drawn.logprobs,
                stages=stages,
            )
        return None if output is None else Hidden(output, stages)

    def compute(self, batch: StepBatch, hidden: Floats | None = None) -> Floats | None:
        """Apply ``batch`` and return this stage's rows: hidden states ``[n_rows, n_embd]``, or on
        the last stage logits ``[n_sampled, n_vocab]``. None for a batch without rows."""
        self._step_began_s = time.monotonic()
        try:
            return self._compute(batch, hidden)
        finally:
            self._step_began_s = None

    def _compute(self, batch: StepBatch, hidden: Floats | None) -> Floats | None:
        context = self._loaded()
        self._check_order(batch)
        self._check_columns(batch)
        context.check_room(batch.num_rows, batch.operations)
        for operation in batch.operations:
            context.apply(operation)
        output = None
        if batch.num_rows:
            output = context.decode(
                Rows(batch.lanes, batch.positions, batch.samples, self._inputs(batch, hidden))
            )
        self._next_step = batch.step_id + 1
        return output

    def sample(self, batch: StepBatch, logits: Floats | None) -> Drawn:
        """The next token of every sampling lane, and why one has none; row k of ``logits`` is the
        k-th of them."""
        self._sampler.configure(batch.new_lanes, batch.forgotten_lanes, batch.histories)
        if logits is None or not len(logits):
            return Drawn()
        # A new token's own position: one past the row it is predicted from.
        places = [position + 1 for position, samples in zip(
            batch.positions, batch.samples, strict=True) if samples]  # fmt: skip
        return self._sampler.sample(batch.sampled_lanes, logits, places)

    def step(self, frame: bytes, activations: bytes | None = None) -> bytes | StepResult | None:
        """:meth:`forward` over the wire's frames."""
        batch, hidden = self._decode_frames(frame, activations)
        answer = self.forward(batch, hidden)
        return encode_activations(batch.epoch, batch.step_id, answer) if isinstance(
            answer, Hidden) else answer  # fmt: skip

    def step_logits(self, frame: bytes, activations: bytes | None = None) -> Any:
        """Like :meth:`step`, but the last stage answers its logits: the instrument of proofs."""
        batch, hidden = self._decode_frames(frame, activations)
        output = self.compute(batch, None if hidden is None else hidden.rows)
        if self.spec.is_last or output is None:
            return output
        return encode_activations(batch.epoch, batch.step_id, Hidden(output))

    def lane_ends(self) -> dict[int, int]:
        """How many positions llama.cpp says each lane holds that is not empty."""
        context = self._loaded()
        ends = {lane: context.positions(lane)[1] + 1 for lane in range(context.num_lanes)}
        return {lane: end for lane, end in ends.items() if end}

    def info(self) -> StageInfo | None:
        """The snapshot taken at load; None before. Never waits for a running step."""
        return self._info

    def loading(self) -> Loading:
        """How far :meth:`load` has come. Never waits for it."""
        return self._loading if self._info is None else Loading("loaded")

    def pulse(self) -> Pulse:
        """How it is just now. Never waits for a running step."""
        began_s = self._step_began_s
        step_s = 0.0 if began_s is None else time.monotonic() - began_s
        rss_bytes, peak_rss_bytes = process_bytes() or (None, None)
        return Pulse(
            self._info is not None, self._epoch, step_s,
            rss_bytes=rss_bytes, peak_rss_bytes=peak_rss_bytes,
        )  # fmt: skip

    def reset_peak(self) -> None:
        """Its process's peak of memory begins anew."""
        reset_peak()

    def node(self) -> str:
        """The machine it runs on."""
        return platform.node()

    def times(self) -> StageTimes:
        """What :meth:`step` has cost since the start."""
        return StageTimes(busy_s=self._busy_s, native_s=self._loaded().native_s)

    def close(self) -> None:
        self._sampler.clear()
        if self._context is not None:
            self._context.close()
            self._context = self._info = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _note_fetched(self, done: int, total: int) -> None:
        self._loading = Loading("fetching", done, total)

    def _note_bytes(self, done: int, total: int) -> None:
        self._loading = Loading("slicing", done, total)

    def _decode_frames(
        self, frame: bytes, activations: bytes | None
    ) -> tuple[StepBatch, Hidden | None]:
        batch = decode_step(frame)
        if activations is None:
            return batch, None
        epoch, step_id, hidden = decode_activations(activations)
        if (epoch, step_id) != (batch.epoch, batch.step_id):
            raise StepOrderError(
                f"activations of step {epoch}/{step_id} came with step "
                f"{batch.epoch}/{batch.step_id}"
            )
        return batch, hidden

    def _inputs(self, batch: StepBatch, hidden: Floats | None) -> Floats:
        if self._embedding is not None:
            return self._embedding(batch.tokens)
        if hidden is None:
            raise InvalidBatchError(f"{self!r}: rows came without activations")
        return hidden

    def _check_order(self, batch: StepBatch) -> None:
        if batch.epoch > self._epoch:
            self._loaded().clear()
            self._sampler.clear()
            self._epoch, self._next_step = batch.epoch, batch.step_id
        elif batch.epoch < self._epoch or batch.step_id != self._next_step:
            raise StepOrderError(
                f"{self!r} expects step {self._epoch}/{self._next_step}, "
                f"got {batch.epoch}/{batch.step_id}"
            )

    def _check_columns(self, batch: StepBatch) -> None:
        """What the context cannot see: that each lane samples at most once."""
        columns = (batch.lanes, batch.positions, batch.tokens, batch.samples)
        if len({len(column) for column in columns}) != 1:
            raise InvalidBatchError(f"columns differ in length: {[len(c) for c in columns]}")
        sampled = batch.sampled_lanes
        if len(set(sampled)) != len(sampled):
            raise InvalidBatchError("a lane samples twice in one step")

    def _loaded(self) -> StageContext:
        if self._context is None:
            index = self.spec.index
            raise StageLostError(f"stage {index} was started again and is not loaded", index)
        return self._context


def _describe(
    part: Part,
    context: StageContext,
    planned: ContextConfig,
    why_inexact: str | None,
    *,
    load_s: float,
    self_test_s: float,
) -> StageInfo:
    spec, memory = part.spec, context.memory()
    planned_bytes = None
    if spec.need:
        need = spec.need.of(planned.num_cells, planned.num_lanes, planned.num_residents)
        planned_bytes = need - spec.need.weights
    return StageInfo(
        index=spec.index,
        num_stages=spec.num_stages,
        first_layer=spec.first_layer,
        end_layer=spec.end_layer,
        num_cells=context.num_cells,
        max_trained_tokens=part.model.max_trained_tokens,
        capacity=_capacity(part, context.num_cells, spec.context),
        planned=_capacity(part, planned.num_cells, planned),
        rules=rules_of(part, context.max_rows),
        kv_type=spec.context.kv_type,
        weight_bytes=memory.weight_bytes,
        context_bytes=memory.context_bytes,
        planned_context_bytes=planned_bytes,
        cell_bytes=spec.need.cell_bytes if spec.need else {},
        profile=part.profile,
        why_inexact=why_inexact,
        process_id=os.getpid(),
        load_s=load_s,
        self_test_s=self_test_s,
    )


def _capacity(part: Part, num_cells: int, config: ContextConfig) -> Capacity:
    spec = part.spec
    layers = part.model.family.layer_kinds(part.model.facts)[spec.first_layer : spec.end_layer]
    kinds = frozenset[str]().union(*layers)
    return Capacity(
        lanes=config.num_lanes,
        residents=config.num_residents,
        attention=num_cells if "attention" in kinds else None,
        window=num_cells if "window" in kinds else None,
        recurrent=config.num_lanes + config.num_residents if "recurrent" in kinds else None,
    )
