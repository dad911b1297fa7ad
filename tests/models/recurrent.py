"""How fast a recurrent layer forgets."""

from __future__ import annotations

import numpy as np

from tests.models.writer import Floats, ModelWriter


def decay_rates(model: ModelWriter, name: str, size: int) -> Floats:
    """Negative rates, most of them between -0.5 and -2."""
    return -np.exp(0.5 * model.normal(name, size))


def step_biases(model: ModelWriter, name: str, size: int) -> Floats:
    """Biases of the step before its softplus, for steps around 1/50.

    The state then remembers some fifty tokens. Without a bias it remembers one or two, and a state
    taken from the wrong place is put right before anyone has looked.
    """
    return np.log(np.expm1(np.float32(0.02))) + 0.5 * model.normal(name, size)
