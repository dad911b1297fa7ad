"""Which of a stage's calls may run at the same time, and which are worth a record each."""

from __future__ import annotations

from typing import Any

import ray

# A decode must not block a question about health, and one thread must own the context.
CONCURRENCY_GROUPS = {"step": 1, "control": 1, "reports": 2, "health": 1}
_GROUP_OF = {
    "load": "step",
    "prepare": "step",
    "serve": "step",
    "step": "step",
    "step_logits": "step",
    "lane_ends": "step",
    "connect": "control",
    "submit": "control",
    "abort": "control",
    "check": "control",
    "close": "control",
    "times": "control",
    "reports": "reports",
    "info": "health",
    "loaded": "control",
    "pulse": "health",
    "reset_peak": "health",
    "loading": "health",
    "node": "health",
}
_OFTEN = ("step", "pulse", "submit", "abort", "reports")
"""Called all the time: a dashboard's record of each call would cost more than it tells."""


def with_groups(plain: type[Any]) -> type[Any]:
    """``plain``, each of whose methods is now in its group."""
    for name, group in _GROUP_OF.items():
        if hasattr(plain, name):
            method = getattr(plain, name)
            ray.method(concurrency_group=group, enable_task_events=name not in _OFTEN)(method)
    return plain
