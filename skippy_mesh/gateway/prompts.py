"""From a body to a prompt: its token ids, and how far the conversation's next prompt agrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.chat import ChatTemplate, Tokenizer, encode_prompt
from skippy_mesh.gateway.schemas import ChatBody, CompletionBody, GenerationBody
from skippy_mesh.gateway.tools import ToolUse


@dataclass(frozen=True, slots=True)
class Prompt:
    """``history_end`` tokens of it are history, 0 if that was not asked or is not known."""

    token_ids: tuple[int, ...]
    history_end: int = 0


class Prompts:
    """Renders and tokenises; takes time, on any thread. ``needs_history`` costs a second rendering
    of every chat."""

    def __init__(self, tokenizer: Tokenizer, *, needs_history: bool):
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._needs_history = needs_history

    def of_chat(self, body: ChatBody, use: ToolUse | None) -> list[Prompt]:
        """The one prompt of a chat."""
        ids = self._encode(body, use, add_generation_prompt=body.add_generation_prompt)
        if not (self._needs_history and body.add_generation_prompt):
            return [Prompt(tuple(ids))]
        try:
            history = self._encode(body, use, add_generation_prompt=False)
        except RequestError:  # of a template that insists on it
            return [Prompt(tuple(ids))]
        return [Prompt(tuple(ids), _num_common(ids, history))]

    def of_completion(self, body: CompletionBody) -> list[Prompt]:
        return [self._of_text_or_ids(prompt, body) for prompt in body.prompt]

    def _of_text_or_ids(self, prompt: str | list[int], body: CompletionBody) -> Prompt:
        if isinstance(prompt, str):
            ids = encode_prompt(self._tokenizer, prompt, add_special=body.add_special_tokens)
            return Prompt(tuple(ids))
        self.check_ids(prompt, param="prompt")
        return Prompt(tuple(prompt))

    def echoes(self, body: GenerationBody) -> list[str]:
        """What goes ahead of the answers to each prompt of ``body``, all fit to be one."""
        if not isinstance(body, CompletionBody) or not body.echo:
            num_prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
            return [""] * num_prompts
        return [
            prompt if isinstance(prompt, str) else self.text_of(prompt) for prompt in body.prompt
        ]

    def text_of(self, ids: Sequence[int], *, special: bool = False) -> str:
        pieces = (self._tokenizer.piece(token, special=special) for token in ids)
        return b"".join(pieces).decode(errors="replace")

    def chat_text(self, body: ChatBody, use: ToolUse | None) -> str:
        """What the model reads of a chat."""
        messages, variables = _for_template(body, use)
        return self._template.text(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continues_last=body.continue_final_message,
            variables=variables,
        )

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        num_tokens = self._tokenizer.num_tokens
        for token in ids:
            if not 0 <= token < num_tokens:
                raise RequestError(
                    f"{param}: token id {token} is not in [0, {num_tokens})", param=param
                )

    def _encode(
        self, body: ChatBody, use: ToolUse | None, *, add_generation_prompt: bool
    ) -> list[int]:
        messages, variables = _for_template(body, use)
        return self._template.encode(
            messages,
            add_generation_prompt=add_generation_prompt,
            continues_last=body.continue_final_message,
            add_special=body.add_special_tokens,
            variables=variables,
        )


def _for_template(
    body: ChatBody, use: ToolUse | None
) -> tuple[list[dict[str, Any]], dict[str, object]]:
    """Messages and variables, as the template is given them."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    variables = body.template_variables
    if use is not None:
        messages = use.messages(messages)
        variables |= use.variables
    return messages, variables


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(others)))
