"""From the flags of ``serve``. Without these a bound is not the one promised, or a key is shown."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from skippy_mesh.cli import build_parser
from skippy_mesh.errors import UsageError
from skippy_mesh.serving import _admission, _shown


def flags(*arguments):
    return build_parser().parse_args(["serve", "/models/tiny.gguf", *arguments])


@pytest.mark.parametrize(
    ("arguments", "ceiling", "bounds"),
    [
        ((), 16, (64, 4 * 4096)),
        ((), 2, (16, 4 * 4096)),
        (("--max-queue", "0", "--max-queue-tokens", "7"), 16, (0, 7)),
    ],
)
def test_the_queue_is_four_times_what_runs_and_four_pools_of_tokens(arguments, ceiling, bounds):
    limits = _admission(flags(*arguments), ceiling=ceiling, num_cells=4096)
    assert (limits.max_queue, limits.max_queue_tokens) == bounds
    assert (limits.ceiling, limits.queue_timeout_s) == (ceiling, 0)


def test_a_bound_below_zero_is_refused_before_anything_is_loaded():
    with pytest.raises(UsageError, match="--max-queue must be 0 or more, got -1"):
        _admission(flags("--max-queue", "-1"), ceiling=1, num_cells=1)


def test_the_status_shows_neither_keys_nor_folders():
    args = flags("--api-key", "secret,other", "--step-log", "/var/log/steps")
    args.some_fraction = Fraction(85, 100)
    text = json.dumps(_shown(args))
    assert not any(word in text for word in ("secret", "other", "/models", "/var"))
    assert {"model", "api_key", "max_queue"} <= _shown(args).keys()
