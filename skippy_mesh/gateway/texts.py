"""Text to tokens and back, without generating: no place, no queue, no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from skippy_mesh.client import EngineClient
from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.body import Body
from skippy_mesh.gateway.chat import Tokenizer, encode_prompt
from skippy_mesh.gateway.parsing import BodyParser, read_json
from skippy_mesh.gateway.prompts import Prompts
from skippy_mesh.gateway.schemas import ChatBody

_FORMS = ("prompt", "messages", "content")
Read = Callable[[Request], Awaitable[bytes]]


class TokenizeBody(Body):
    """A ``prompt`` as vLLM has it, or a ``content`` as llama-server does."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        if self.prompt is not None:
            return encode_prompt(tokenizer, self.prompt, add_special=self.add_special_tokens)
        return tokenizer.encode(
            self.content or "", add_special=self.add_special, parse_special=self.parse_special
        )


class TokenizeChat(ChatBody):
    """vLLM's other form: ``messages``."""

    add_special_tokens: bool = False
    return_token_strs: bool = False
    with_pieces: bool = False


class DetokenizeBody(Body):
    tokens: list[int] = Field(max_length=1 << 20)


class Texts:
    """The routes. ``read`` gives the bytes of a body, within the limit of this server."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Prompts,
        parser: BodyParser,
        read: Read,
        *,
        engine: EngineClient,
        tool_parser: str | None = None,
    ):
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._prompts = prompts
        self._parser = parser
        self._read = read
        self._engine = engine

    async def tokenize(self, http: Request) -> Response:
        fields = read_json(await self._read(http))
        forms = [name for name in _FORMS if fields.get(name) is not None]
        if len(forms) != 1:
            raise RequestError(f"give one of {', '.join(_FORMS)}", param="prompt")
        body: TokenizeBody | TokenizeChat
        if forms == ["messages"]:
            body = self._parser.check(TokenizeChat, fields)
            _, ids = await self._render(body)
        else:
            body = self._parser.check(TokenizeBody, fields)
            ids = await asyncio.to_thread(body.encode, self._tokenizer)
        found: dict[str, object] = {
            "tokens": [self._piece(token) for token in ids] if body.with_pieces else ids,
            "count": len(ids),
            "max_model_len": self._engine.max_model_len,
        }
        if body.return_token_strs:
            found["token_strs"] = [self._bytes(token).decode(errors="replace") for token in ids]
        return JSONResponse(found)

    async def detokenize(self, http: Request) -> Response:
        body = self._parser.parse(DetokenizeBody, await self._read(http))
        self._prompts.check_ids(body.tokens, param="tokens")
        text = await asyncio.to_thread(self._prompts.text_of, body.tokens, special=True)
        return JSONResponse({"prompt": text, "content": text})

    async def apply_template(self, http: Request) -> Response:
        body = self._parser.parse(TokenizeChat, await self._read(http))
        text, ids = await self._render(body)
        return JSONResponse({"prompt": text, "count": len(ids)})

    async def _render(self, body: TokenizeChat) -> tuple[str, list[int]]:
        use = body.tool_use(self._tokenizer.chat_template, self._tool_parser)
        return await asyncio.to_thread(self._prompts.render, body, use)

    def _piece(self, token: int) -> dict[str, object]:
        data = self._bytes(token)
        try:
            return {"id": token, "piece": data.decode()}
        except UnicodeDecodeError:
            return {"id": token, "piece": list(data)}

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.piece(token, special=True)
