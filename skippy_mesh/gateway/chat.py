"""From chat messages to token ids, by the template the model file carries.

A template's own control tokens must become tokens, and the same letters inside a message must not:
otherwise a user could end their turn and write the system's. So control texts inside messages are
replaced by marks before rendering, and after it the pieces between marks are tokenised with
control tokens recognised, the marked texts without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skippy_mesh.errors import RequestError

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_MAX_ERROR_CHARS = 200
Piece = tuple[str, bool]
"""A text, and whether it is the template's own."""


class Tokenizer(Protocol):
    """What the gateway needs of a model's vocabulary; any thread may use it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def max_trained_tokens(self) -> int: ...
    @property
    def eog_ids(self) -> frozenset[int]: ...
    @property
    def special_texts(self) -> tuple[str, ...]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def bos_text(self) -> str: ...
    @property
    def eos_text(self) -> str: ...
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...
    def piece(self, token_id: int, *, special: bool = False) -> bytes: ...


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
    """A raw prompt, its control tokens recognised; one BOS even where the prompt writes its own."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    return with_one_bos(tokenizer, ids) if add_special else ids


def with_one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """``ids`` behind a BOS if the model's metadata wants one and it is not there already."""
    bos = tokenizer.encode(tokenizer.bos_text, add_special=False, parse_special=True)
    wanted = tokenizer.encode("", add_special=True, parse_special=False)
    return bos + ids if bos and wanted[:1] == bos != ids[:1] else ids


class ChatTemplate:
    """The model's template, rendered as Hugging Face renders it.

    ``now`` is the clock behind ``strftime_now``.
    """

    def __init__(self, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now):
        self._tokenizer = tokenizer
        self._now = now

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        add_special: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """:meth:`ids_of` what :meth:`render` makes of the conversation."""
        pieces = self.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.ids_of(pieces, add_special=add_special)

    def ids_of(self, pieces: Iterable[Piece], *, add_special: bool = True) -> list[int]:
        ids = [
            token
            for piece, is_own in pieces
            for token in self._tokenizer.encode(piece, add_special=False, parse_special=is_own)
        ]
        return with_one_bos(self._tokenizer, ids) if add_special else ids

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continues_last: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> list[Piece]:
        """The conversation as the model reads it. ``variables`` are the client's, for the
        template. With ``continues_last`` the text of the last message is left open.

        :class:`RequestError` ``template_error`` if the model has no template or it refuses.
        """
        marks = _Marks(self._special, self._unused_char(messages, variables))
        hidden = marks.hide(messages)
        text = self._render(
            {
                "tools": None,
                "documents": None,
                **{name: marks.hide(value) for name, value in (variables or {}).items()},
                "messages": hidden,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self._tokenizer.bos_text,
                "eos_token": self._tokenizer.eos_text,
            }
        )
        if continues_last:
            text = _up_to_last(text, str(hidden[-1].get("content") or ""))
        return list(marks.split(text))

    def _render(self, variables: Mapping[str, object]) -> str:
        try:
            return self._template.render(variables)
        except RequestError:
            raise
        except TemplateError as error:
            reason = str(error)
        except Exception as error:  # a template is a program: it may fail in any way
            reason = type(error).__name__
        raise _template_error(
            f"the model's chat template refuses these messages: {reason[:_MAX_ERROR_CHARS]}"
        )

    def _unused_char(self, *values: object) -> str:
        used = set(json.dumps([values, self._tokenizer.chat_template], ensure_ascii=False))
        for code in chain(*_PRIVATE_USE):
            if chr(code) not in used:
                return chr(code)
        raise _template_error("the messages use every private-use character of Unicode")

    @cached_property
    def _special(self) -> dict[str, int]:
        # Longest first, so that a text which begins with another is found whole.
        texts = sorted(filter(None, self._tokenizer.special_texts), key=len, reverse=True)
        return {text: index for index, text in enumerate(texts)}

    @cached_property
    def _template(self) -> Template:
        if self._tokenizer.chat_template is None:
            raise _template_error(
                "this model file has no chat template; use /v1/completions with a plain prompt"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        return environment.from_string(self._tokenizer.chat_template)


def _up_to_last(text: str, content: str) -> str:
    """``text`` up to the end of ``content``, the last message's, which the template may strip."""
    found = text.rfind(content.strip())
    if not content.strip() or found < 0:
        raise _template_error("the last message has no text that could be continued")
    kept = content.lstrip()
    if not text.startswith(kept, found):
        kept = content.strip()
    return text[: found + len(kept)]


class _Marks:
    """Hides ``special`` texts behind ``char`` and finds them again. A mark is char, index, char."""

    def __init__(self, special: Mapping[str, int], char: str):
        self._special = special
        self._texts = list(special)
        self._char = char
        self._pattern = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def hide(self, value: Any) -> Any:
        """``value`` with every string inside it made harmless."""
        match value:
            case str():
                return self._pattern.sub(self._mark, value)
            case Mapping():
                return {self.hide(key): self.hide(item) for key, item in value.items()}
            case Sequence():
                return [self.hide(item) for item in value]
        return value

    def split(self, text: str) -> Iterable[Piece]:
        """The pieces of ``text`` in order, each with whether it is the template's own."""
        parts = re.split(f"{self._char}(\\d+){self._char}", text)
        for place, part in enumerate(parts):
            is_own = place % 2 == 0
            if part:
                yield (part if is_own else self._texts[int(part)]), is_own

    def _mark(self, match: re.Match[str]) -> str:
        return f"{self._char}{self._special[match[0]]}{self._char}"


class _GenerationTag(Extension):
    """``{% generation %}`` marks what to train on; serving only needs its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _template_error(message: str) -> RequestError:
    return RequestError(message, param="messages", code="template_error")
