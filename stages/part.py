"""A stage's part of a model before anything is loaded: layers, kernels, and how much memory.

Everything that may be refused is refused here, so that nobody waits for a slice first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from skippy_mesh.config import ContextConfig, PrefixRule, StageSpec, StepRules
from skippy_mesh.errors import RuntimeUnavailableError, UsageError
from skippy_mesh.families import Family, check_slice
from skippy_mesh.sizes import available_bytes, format_size
from stages.context import StageContext
from stages.disk import Progress
from stages.download import local_model
from stages.gguf_file import ModelFile
from stages.probe import can_repack
from stages.profile import PLAIN, Profile, choose_profile, matrix_types, replays_in_chunks
from stages.slices import slice_bytes
from stages.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a stage runs. Its ``spec`` asks for no larger context than there is memory for, and with
    the weights loaded ``spare_bytes`` of it will be left; None if nobody knows."""

    model: ModelFile
    spec: StageSpec
    profile: Profile
    spare_bytes: int | None

    @property
    def num_layers(self) -> int:
        return self.spec.end_layer - self.spec.first_layer

    def can_cut(self, lo: int, hi: int) -> bool:
        """Whether layers [lo, hi) can be a slice of their own."""
        try:
            check_slice(self.model.family, self.model.facts, lo, hi)
        except UsageError:
            return False
        return True


def part_of(spec: StageSpec, fetched: Progress | None = None) -> Part:
    """What the stage of ``spec`` runs on this machine as it is now. ``fetched`` is told how much of
    the model is there, if it has to be fetched first."""
    source = local_model(spec.model_path, fetched)
    model = ModelFile.open(source, allow_unproven=spec.allow_unproven)
    num_bytes, free = slice_bytes(model, spec.first_layer, spec.end_layer), available_bytes()
    fitting = _fitting(spec, free)
    profile = PLAIN
    if spec.context.exact:
        profile = choose_profile(matrix_types(model.tensors.values()), can_repack=can_repack())
    return Part(
        model=model,
        spec=replace(spec, context=fitting),
        profile=profile,
        spare_bytes=None if free is None else free - num_bytes,
    )


def _fitting(spec: StageSpec, free: int | None) -> ContextConfig:
    """What was planned, or as much of it as ``free`` bytes hold: a smaller context lowers the
    ceiling, a larger one would push every process of this machine out."""
    if spec.need is None or free is None:
        return spec.context
    fitting = spec.need.fit(spec.context, free)
    if fitting is None:
        raise RuntimeUnavailableError(
            f"stage {spec.index} has no memory for even one session: layers {spec.first_layer}:"
            f"{spec.end_layer} take {format_size(spec.need.of(1, 1), round_up=True)} with the "
            f"smallest context, and {format_size(free)} are free; end other programs, or use more "
            f"--stages on other machines"
        )
    return fitting


def new_context(
    part: Part,
    source: Path | Weights,
    config: ContextConfig,
    *,
    is_last: bool,
    first_layer: int | None = None,
    stop_after_layers: int | None = None,
    keeps_hidden: bool = False,
) -> StageContext:
    """A context over ``source``: all of ``part``, or the slice that begins at ``first_layer``."""
    first = part.spec.first_layer if first_layer is None else first_layer
    family = part.model.family
    return StageContext(
        source,
        config,
        is_last=is_last,
        is_recurrent=family.is_recurrent,
        scaled_input=family.scaled_input if first else "",
        takes_rows=family.takes_rows,
        profile=part.profile,
        stop_after_layers=stop_after_layers,
        keeps_hidden=keeps_hidden,
    )


def _prefix_rule(family: Family) -> PrefixRule:
    """Windows are kept whole (context.py), so their prefixes are like any other's. Of an unproven
    architecture nobody knows what a copy copies."""
    if not family.is_proven:
        return "none"
    return "boundary" if family.prefix_rule == "boundary" else "any"


def rules_of(part: Part, max_rows: int) -> StepRules:
    """What a step of this stage may hold, ``max_rows`` at most."""
    family = part.model.family
    return StepRules(
        max_rows=max_rows,
        is_homogeneous=family.step_rule == "homogeneous",
        chunk_multiple=part.profile.pad if family.is_recurrent else 1,
        replays_in_chunks=replays_in_chunks(family, part.model.tensors),
        prefix_rule=_prefix_rule(family),
    )
