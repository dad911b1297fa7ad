"""The HTTP server: the OpenAI API in front of an engine.

The life of a request: read the body, check it, take a place, render and tokenise off the event
loop, count the tokens, submit to the engine, answer. Nothing is sent before the first output or
error, so every refusal is a real HTTP status.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from skippy_mesh.client import EngineClient
from skippy_mesh.errors import SkippyError
from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.constraints import Constraint, GrammarCompiler, Grammars
from skippy_mesh.gateway.errors import (
    ApiError,
    Edge,
    timed_out,
    to_api_error,
    unavailable,
    valid_request_id,
)
from skippy_mesh.gateway.places import Places
from skippy_mesh.gateway.prefixes import Sharing
from skippy_mesh.gateway.prompts import Prompt, Prompts
from skippy_mesh.gateway.refusals import Bounds
from skippy_mesh.gateway.replies import Reply
from skippy_mesh.gateway.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    parse_body,
)
from skippy_mesh.gateway.streaming import (
    EventStream,
    Limits,
    TokenStream,
    all_deltas,
    next_delta,
    unless_gone,
)
from skippy_mesh.gateway.text import Choice
from skippy_mesh.gateway.tools import ToolUse
from skippy_mesh.messages import Request as EngineRequest

LOADING = "loading"
DRAINING = "draining"
_SEED_BITS = 53  # what a client in JavaScript can echo without rounding


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    *,
    model_name: str,
    health: Callable[[], str | None],
    places: Places,
    bounds: Bounds,
    exact: bool = False,
    exact_reason: str | None = None,
    api_keys: Sequence[str] = (),
    limits: Limits | None = None,
    sharing: Sharing | None = None,
    metrics: Callable[[], bytes] = bytes,
    status: Callable[[], Mapping[str, object]] = dict,
    on_reject: Callable[[str], None] | None = None,
) -> FastAPI:
    """The application.

    ``health`` answers at once: None when the mesh can serve, :data:`LOADING` while it starts,
    :data:`DRAINING` while it ends, else the reason it cannot, in words fit for a client.
    ``exact_reason`` says why ``exact`` is false. ``metrics`` renders the page at ``/metrics``,
    ``status`` is what ``/status`` shows; neither waits for the engine. ``on_reject`` gets the code
    of every refused generation.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Edge, api_keys=api_keys, on_reject=on_reject)
    app.add_exception_handler(HTTPException, _answer_error)
    gateway = Gateway(
        engine, tokenizer, grammars,
        model_name=model_name, health=health, places=places, bounds=bounds, limits=limits,
        sharing=sharing,
    )  # fmt: skip
    healthy: dict[str, object] = {"status": "ok", "exact": exact}
    if exact_reason is not None:
        healthy["exact_reason"] = exact_reason

    async def answer_health() -> Response:
        gateway.refuse_if_unhealthy()
        return JSONResponse(healthy)

    for path in ("/health", "/v1/health"):
        app.add_api_route(path, answer_health, methods=["GET"])
    _add_pages(app, metrics=metrics, status=status)
    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", gateway.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", gateway.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", gateway.completions, methods=["POST"])
    return app


def _add_pages(
    app: FastAPI, *, metrics: Callable[[], bytes], status: Callable[[], Mapping[str, object]]
) -> None:
    """What is told of the server itself, whatever state the engine is in."""

    async def answer_status() -> Response:
        return JSONResponse(status())

    async def answer_live() -> Response:
        return JSONResponse({"status": "ok"})

    async def answer_metrics() -> Response:
        page = await asyncio.to_thread(metrics)  # milliseconds, and tokens are on their way
        return Response(page, media_type="text/plain; version=0.0.4")

    app.add_api_route("/metrics", answer_metrics, methods=["GET"])
    app.add_api_route("/status", answer_status, methods=["GET"])
    for path in ("/livez", "/ping"):
        app.add_api_route(path, answer_live, methods=["GET"])


async def _answer_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response()


class Gateway:
    """The routes that need the engine, and the ids of the requests it is working on."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        *,
        model_name: str,
        health: Callable[[], str | None],
        places: Places,
        bounds: Bounds,
        limits: Limits | None = None,
        sharing: Sharing | None = None,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._grammars = Grammars(grammars)
        self._sharing = sharing or Sharing()
        self._prompts = Prompts(tokenizer, needs_history=self._sharing.needs_history)
        self._model_name = model_name
        self._health = health
        self._places = places
        self._bounds = bounds
        self._limits = limits or Limits()
        self._started_at = int(time.time())
        self._open_ids: set[str] = set()

    def refuse_if_unhealthy(self) -> None:
        reason = self._health()
        if reason == LOADING:
            raise unavailable("loading", "Loading model")
        if reason == DRAINING:
            raise unavailable("draining", "this server is about to end; ask another one")
        if reason is not None:
            raise unavailable("stage_unavailable", reason)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        if name != self._model_name:
            raise ApiError(
                404,
                "model_not_found",
                f"no model of this name; this server serves {self._model_name!r}",
                param="model",
            )
        return JSONResponse(self._card())

    async def chat_completions(self, http: Request) -> Response:
        self.refuse_if_unhealthy()
        body = parse_body(ChatBody, await self._read(http))
        use = body.tool_use(self._tokenizer.chat_template)
        encode = functools.partial(self._prompts.of_chat, body, use)
        return await self._complete(http, body, encode, use=use)

    async def completions(self, http: Request) -> Response:
        self.refuse_if_unhealthy()
        body = parse_body(CompletionBody, await self._read(http))
        encode = functools.partial(self._prompts.of_completion, body)
        return await self._complete(http, body, encode)

    async def _complete(
        self,
        http: Request,
        body: GenerationBody,
        encode: Callable[[], Prompt],
        *,
        use: ToolUse | None = None,
    ) -> Response:
        constraint = (use and use.constraint) or body.constraint
        request, tokens = await self._submit(http, body, encode, constraint)
        try:
            reply, choice = self._reply(body, request), self._choice(body, use)
            answering = self._answer(reply, tokens, choice, body)
            return await unless_gone(answering, http.receive)
        except BaseException:
            tokens.close()
            raise

    def _reply(self, body: GenerationBody, request: EngineRequest) -> Reply:
        return Reply(
            request_id=request.request_id,
            created=int(time.time()),
            model=self._model_name,
            is_chat=isinstance(body, ChatBody),
            seed=request.sampling.seed,
            num_prompt_tokens=len(request.token_ids),
            prefix_kind=self._sharing.kind,
            prompt_ids=list(request.token_ids) if body.return_token_ids else None,
        )

    def _choice(self, body: GenerationBody, use: ToolUse | None) -> Choice:
        return Choice(
            self._tokenizer,
            body.text_rules(
                prefix=self._prompts.echo(body),
                shows_special=use is not None and use.shows_special,
            ),
            tools=use.parser() if use is not None else None,
        )

    async def _answer(
        self, reply: Reply, tokens: TokenStream, choice: Choice, body: GenerationBody
    ) -> Response:
        if not body.stream:
            whole = await all_deltas(tokens, choice)
            tokens.close()
            return JSONResponse(reply.whole(whole, choice.spent))
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.hold_s):
                first = await next_delta(tokens, choice)
        return EventStream(
            reply,
            tokens,
            choice,
            first=first,
            options=body.stream_options or StreamOptions(),
            limits=self._limits,
        )

    async def _submit(
        self,
        http: Request,
        body: GenerationBody,
        encode: Callable[[], Prompt],
        constraint: Constraint | None,
    ) -> tuple[EngineRequest, TokenStream]:
        """The request on its way. Whatever fails here gives back its place and its id; afterwards
        the stream does, when the engine is done with it."""
        with self._bounds.refusals():
            place = await self._places.take()
        request_id = self._name_request(http, body)
        self._open_ids.add(request_id)

        def give_back() -> None:
            self._open_ids.discard(request_id)
            place.end()

        try:
            prompt = await asyncio.to_thread(encode)
            grammar = await self._grammars.compiled(constraint)
            request = self._engine_request(http, request_id, body, prompt, grammar)
            field = "messages" if isinstance(body, ChatBody) else "prompt"
            self._bounds.check_fits(request, self._engine.max_model_len, field=field)
            with self._bounds.refusals():
                await place.count(len(prompt.token_ids))
            return request, self._start(request, on_start=place.start, on_end=give_back)
        except BaseException:
            give_back()
            raise

    def _start(
        self,
        request: EngineRequest,
        *,
        on_start: Callable[[], object],
        on_end: Callable[[], object],
    ) -> TokenStream:
        limits = self._limits
        tokens = TokenStream(
            limits,
            abort=lambda: self._engine.abort(request.request_id),
            on_start=on_start,
            # Not sooner: until then the engine knows the id, and a new request must not share it.
            on_end=on_end,
        )
        try:
            self._engine.submit(request, tokens.put, on_start=tokens.start)
        except SkippyError as error:
            raise unavailable("draining", str(error)) from None
        tokens.limit(
            in_queue=self._bounds.waited_too_long(limits.queue_timeout_s),
            in_all=timed_out(limits.request_timeout_s),
        )
        return tokens

    def _engine_request(
        self, http: Request, request_id: str, body: GenerationBody, prompt: Prompt, grammar: str
    ) -> EngineRequest:
        for param, ids in body.named_ids.items():
            self._prompts.check_ids(ids, param=param)
        eog_ids = self._tokenizer.eog_ids
        sampling = body.sampling(
            eog_ids=eog_ids, draw_seed=lambda: secrets.randbits(_SEED_BITS), grammar=grammar
        )
        stop_ids = eog_ids.union(body.stop_token_ids).difference(sampling.suppressed_ids)
        return EngineRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            max_tokens=body.token_limit,
            namespace=self._sharing.namespace(http.state.key_id, body.cache_salt),
            shares_prefix=body.cache_prompt,
            history_end=prompt.history_end,
            sampling=sampling,
            stop_token_ids=stop_ids,
        )

    def _name_request(self, http: Request, body: GenerationBody) -> str:
        """The request's final id, unique among those in flight; the reply's header carries it."""
        name: str = http.state.request_id
        if valid_request_id(http.headers.get("x-request-id")) is None:
            name = valid_request_id(body.request_id) or name
        final, number = name, 1
        while final in self._open_ids:
            number += 1
            final = f"{name}-{number}"
        http.state.request_id = final
        return final

    async def _read(self, http: Request) -> bytes:
        limit = self._limits.max_body_bytes
        too_large = ApiError(413, "request_too_large", f"the body may have at most {limit} bytes")
        if int(http.headers.get("content-length", "0")) > limit:
            raise too_large
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "skippy",
            "root": self._model_name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "permission": [],
            "meta": {
                "n_vocab": self._tokenizer.num_tokens,
                "n_ctx": self._engine.max_model_len,
                "n_ctx_train": self._tokenizer.max_trained_tokens,
            },
        }
