"""The HTTP server: the OpenAI API in front of an engine, and what tells of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from skippy_mesh.client import EngineClient
from skippy_mesh.gateway.about import About
from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.constraints import GrammarCompiler
from skippy_mesh.gateway.errors import PUBLIC_PATHS, ApiError, Edge, to_api_error
from skippy_mesh.gateway.generation import Generation
from skippy_mesh.gateway.openapi import document
from skippy_mesh.gateway.parsing import BodyParser
from skippy_mesh.gateway.places import Places
from skippy_mesh.gateway.prefixes import Sharing
from skippy_mesh.gateway.prompts import Prompts
from skippy_mesh.gateway.readiness import Problem, Readiness
from skippy_mesh.gateway.refusals import Bounds
from skippy_mesh.gateway.rules import ApiRules
from skippy_mesh.gateway.texts import Read, Texts
from skippy_mesh.gateway.token_stream import Limits

Route = Callable[..., object]


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    *,
    model_name: str,
    health: Callable[[], Problem | None],
    places: Places,
    bounds: Bounds,
    exact: bool = False,
    exact_reason: str | None = None,
    key_digests: Sequence[str] = (),
    limits: Limits | None = None,
    rules: ApiRules | None = None,
    sharing: Sharing | None = None,
    metrics: Callable[[], bytes] = bytes,
    reset_peaks: Callable[[], None] = lambda: None,
    status: Callable[[], Mapping[str, object]] = dict,
    on_reject: Callable[[str], None] | None = None,
    on_stall: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The application.

    ``health`` answers at once: None when the mesh can serve. ``exact_reason`` says why ``exact`` is
    false. ``metrics`` renders the page at ``/metrics``, ``status`` is what ``/status`` shows;
    neither waits for the engine. ``reset_peaks`` lets the stages' peaks of memory begin anew.
    ``on_reject`` gets the code of every refused generation, ``on_stall`` hears of every stream that
    was ended because nobody read it. ``state.refuse_waiting()`` sends away who is in the queue.
    """
    limits, rules, sharing = limits or Limits(), rules or ApiRules(), sharing or Sharing()
    app = FastAPI(
        root_path=rules.root_path,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    public = PUBLIC_PATHS - {"/metrics"} if rules.guards_metrics else PUBLIC_PATHS
    app.add_middleware(Edge, key_digests=key_digests, public_paths=public, on_reject=on_reject)
    if rules.cors_origins:
        # Outermost: a browser asks, without a key, before it sends one.
        app.add_middleware(
            CORSMiddleware, allow_origins=rules.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    app.add_exception_handler(HTTPException, _answer_error)
    readiness = Readiness(
        health, engine, exact=exact, exact_reason=exact_reason, window_s=limits.ready_window_s
    )
    about = About(model_name, tokenizer, rules, engine=engine, bounds=bounds)
    prompts = Prompts(tokenizer, needs_history=sharing.needs_history)
    read = _reader(limits.max_body_bytes)
    texts = Texts(
        tokenizer, prompts, BodyParser(is_strict=rules.is_strict_field), read,
        engine=engine, tool_parser=rules.tool_parser,
    )  # fmt: skip
    generation = Generation(
        engine, tokenizer, grammars, prompts,
        model_name=model_name, about=about, readiness=readiness, places=places, bounds=bounds,
        limits=limits, sharing=sharing, rules=rules, read=read, on_stall=on_stall,
    )  # fmt: skip
    for path, route in {
        "/": about.home,
        "/livez": _live, "/ping": _live,
        "/health": readiness.health, "/v1/health": readiness.health,
        "/ready": readiness.ready,
        "/version": about.version,
        "/metrics": _page(metrics), "/status": _status(status),
        "/props": about.props,
        "/openapi.json": _document,
        "/v1/models": about.models, "/v1/models/{name:path}": about.model,
    }.items():  # fmt: skip
        app.add_api_route(path, route, methods=["GET"])
    for path, route in {
        "/v1/chat/completions": generation.chat_completions,
        "/v1/completions": generation.completions,
        "/v1/abort": generation.abort, "/abort_requests": generation.abort,
        "/v1/peak_reset": _reset(reset_peaks),
        "/tokenize": texts.tokenize, "/detokenize": texts.detokenize,
        "/apply-template": texts.apply_template,
    }.items():  # fmt: skip
        app.add_api_route(path, route, methods=["POST"])
    app.state.refuse_waiting = generation.refuse_waiting
    return app


async def _document() -> Response:
    return JSONResponse(document())


async def _live() -> Response:
    return JSONResponse({"status": "ok"})


def _page(metrics: Callable[[], bytes]) -> Route:
    async def answer() -> Response:
        page = await asyncio.to_thread(metrics)  # milliseconds, and tokens are on their way
        return Response(page, media_type="text/plain; version=0.0.4")

    return answer


def _reset(reset_peaks: Callable[[], None]) -> Route:
    async def answer() -> Response:
        await asyncio.to_thread(reset_peaks)  # a stage may be silent
        return Response(status_code=204)

    return answer


def _status(status: Callable[[], Mapping[str, object]]) -> Route:
    async def answer() -> Response:
        return JSONResponse(status())

    return answer


def _reader(limit: int) -> Read:
    """Reads the body of a request, of ``limit`` bytes at most."""
    too_large = ApiError(413, "request_too_large", f"the body may have at most {limit} bytes")

    async def read(http: Request) -> bytes:
        if int(http.headers.get("content-length", "0")) > limit:
            raise too_large
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)

    return read


async def _answer_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response()
