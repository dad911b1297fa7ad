"""Whether a loaded stage may call itself exact, and if not, why."""

from __future__ import annotations

from skippy_mesh.config import EXACT_KV_TYPES
from stages import selftest
from stages.probe import machine_key
from stages.profile import matrix_types
from stages.views import Loaded, views_of


def why_unprovable(stage: Loaded) -> str | None:
    """Why no test could show that this stage is exact."""
    model, config = stage.model, stage.spec.context
    if not config.exact:
        return "switched off (--exact off)"
    if not model.family.is_proven:
        return f"nothing is proven of architecture {model.architecture} (--allow-unproven)"
    if config.kv_type not in EXACT_KV_TYPES:
        return f"with {config.kv_type} KV, attention rounds by the shape of a step"
    return None


def verdict_key(stage: Loaded) -> tuple[str, ...]:
    """What a verdict holds for. Once per machine this reads the whole file, for its digest."""
    spec, config = stage.spec, stage.spec.context
    return (
        stage.model.digest, f"{spec.first_layer}:{spec.end_layer}", machine_key(),
        config.kv_type, str(config.num_threads), repr(stage.profile),
    )  # fmt: skip


def why_inexact(stage: Loaded, key: tuple[str, ...]) -> str | None:
    model, config = stage.model, stage.spec.context
    failure = selftest.verdict(key, views_of(stage), config, is_recurrent=model.family.is_recurrent)
    if failure is None:
        return None
    types = ", ".join(sorted(matrix_types(model.tensors.values())))
    return f"the self-test failed: {failure}; weights are {types}, {stage.profile}"
