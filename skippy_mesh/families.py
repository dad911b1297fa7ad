"""The model families that can be cut, and the rule of each.

A family is proven, not assumed: a row is here because tests show its slices bit-equal to the
undivided model. Everything else is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from skippy_mesh.errors import UnsupportedModelError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One KV class.

    ``architectures`` are GGUF ``general.architecture`` names. ``cut_sensitive_keys`` (without the
    architecture prefix) mean, when a file has them, that its layers are not all of one kind: rules
    for those come with the families that need them.
    """

    name: str
    architectures: tuple[str, ...]
    cut_sensitive_keys: tuple[str, ...] = ()


DENSE = Family(
    name="dense",
    architectures=("llama",),
    cut_sensitive_keys=("attention.sliding_window", "interleave_moe_layer_step", "expert_count"),
)

FAMILIES = (DENSE,)


def family_of(architecture: str) -> Family:
    """The family of an architecture, or :class:`UnsupportedModelError` naming those that work."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported: no proven way to cut it "
        f"(supported: {known})"
    )


def even_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Cut ``num_layers`` into ``num_stages`` runs whose lengths differ by at most one.

    Returns the ``num_stages - 1`` inner borders. The earlier stages are the longer ones: the last
    stage also computes the output head.
    """
    if not 1 <= num_stages <= num_layers:
        raise UsageError(
            f"cannot cut {num_layers} layers into {num_stages} stages: "
            f"choose from 1 to {num_layers}"
        )
    base, longer = divmod(num_layers, num_stages)
    borders, at = [], 0
    for stage in range(num_stages - 1):
        at += base + (stage < longer)
        borders.append(at)
    return tuple(borders)


def check_cuts(num_layers: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """The given inner borders; :class:`UsageError` unless each stage gets at least one layer."""
    borders = (0, *cuts, num_layers)
    if any(lo >= hi for lo, hi in itertools.pairwise(borders)):
        raise UsageError(
            f"cuts {','.join(map(str, cuts))} are not legal for a model of {num_layers} layers: "
            f"they must rise and lie between 1 and {num_layers - 1}"
        )
    return tuple(cuts)
