"""From a body to a prompt: its token ids, and how far the conversation's next prompt agrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        _, ids = self.render(body, use)
        if not (self._needs_history and body.add_generation_prompt):
            return [Prompt(tuple(ids))]
        try:
            _, history = self._render(body, use, add_generation_prompt=False)
        except RequestError:  # of a template that insists on it
            return [Prompt(tuple(ids))]
        return [Prompt(tuple(ids), _num_common(ids, history))]

    def render(self, body: ChatBody, use: ToolUse | None) -> tuple[str, list[int]]:
        """What the model reads of a chat, as text and as tokens."""
        return self._render(body, use, add_generation_prompt=body.add_generation_prompt)

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

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        num_tokens = self._tokenizer.num_tokens
        for token in ids:
            if not 0 <= token < num_tokens:
                raise RequestError(
                    f"{param}: token id {token} is not in [0, {num_tokens})", param=param
                )

    def _render(
        self, body: ChatBody, use: ToolUse | None, *, add_generation_prompt: bool
    ) -> tuple[str, list[int]]:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        variables = body.template_variables
        if use is not None:
            messages = use.messages(messages)
            variables |= use.variables
        pieces = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continues_last=body.continue_final_message,
            variables=variables,
        )
        text = "".join(piece for piece, _ in pieces)
        return text, self._template.ids_of(pieces, add_special=body.add_special_tokens)


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(others)))
