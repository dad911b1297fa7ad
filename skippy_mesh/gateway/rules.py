"""What this server decides of requests, where the API leaves it a choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skippy_mesh.errors import UsageError

MAX_N = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRules:
    """``aliases`` are further names of the model, ``tokenizer_id`` where a client finds its
    tokenizer, ``facts`` what its card says besides. ``defaults`` stand for sampling fields that a
    request leaves out; of chats, ``max_chat_tokens`` too. At most ``max_n`` answers to a prompt.
    ``knows_priority``: the scheduler looks at it. ``guards_metrics``: the page needs a key, too.
    ``chat_template`` stands for the model's own, ``tool_parser`` for the form of calls that the
    template leads to. Pages of ``cors_origins`` may ask; ``root_path`` is what a proxy takes off.
    ``logs_prompts``: what is asked and answered may be in the log.
    """

    aliases: tuple[str, ...] = ()
    tokenizer_id: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    max_chat_tokens: int | None = None
    max_n: int = MAX_N
    is_strict_field: bool = False
    is_strict_model: bool = False
    knows_priority: bool = False
    guards_metrics: bool = False
    chat_template: str | None = None
    tool_parser: str | None = None
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    logs_prompts: bool = False

    def __post_init__(self) -> None:
        if self.max_n < 1:
            raise UsageError(f"--max-n must be at least 1, got {self.max_n}")
