"""One error shape for every reply that is not a success, and the layer that guarantees it.

:class:`Edge` wraps the whole application: whatever a route raises, and whatever the router answers
by itself, leaves as ``{"error": {message, type, param, code}}`` with the request's id on it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable, Container, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skippy_mesh.errors import RequestError

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({
    "/", "/livez", "/ping", "/health", "/v1/health", "/ready", "/metrics", "/version",
    "/openapi.json",
})  # fmt: skip
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
RETRY_AFTER_S = 5
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An HTTP error: the status, the machine-readable ``code`` and a line for people.

    ``details`` are further keys of the error object, such as ``n_ctx``.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    @property
    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
                **self.details,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def engine_failed() -> ApiError:
    # The engine's own words may hold paths and native traces, so they stay in its log.
    return ApiError(
        500,
        "engine_error",
        "the engine could not complete this request; the reason is in the server's log",
        headers={"x-should-retry": "false"},
    )


def unavailable(code: str, message: str) -> ApiError:
    return ApiError(503, code, message, headers={"Retry-After": str(RETRY_AFTER_S)})


def refused(
    code: str, message: str, *, retry_after_s: int, limit_by: Mapping[str, object]
) -> ApiError:
    """Overload: come back later."""
    return ApiError(
        429, code, message,
        headers={"Retry-After": str(retry_after_s)}, details={"limit_by": limit_by},
    )  # fmt: skip


def timed_out(limit_s: float) -> ApiError:
    return ApiError(
        504,
        "request_timeout",
        f"the request took longer than {limit_s:g} s, the limit of this server",
        headers={"x-should-retry": "false"},
    )


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of ``error``; an unforeseen one goes to the log with its traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, error.code, str(error), param=error.param)
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(
            error.status_code, code or "invalid_value", error.detail, headers=error.headers
        )
    logger.error("unforeseen error in the gateway", exc_info=error)
    return ApiError(500, "internal_error", "internal error; its traceback is in the server's log")


def valid_request_id(text: object) -> str | None:
    """``text`` if a client may name its request so, else None."""
    return text if isinstance(text, str) and _REQUEST_ID.fullmatch(text) else None


def digests_of(*keys: str) -> tuple[str, ...]:
    """What is kept of keys: enough to know them again."""
    return tuple(_digest(key.encode()) for key in keys)


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


class Edge:
    """The outermost layer: names the request, checks its key, answers for whatever fails inside.

    ``scope["state"]["request_id"]`` is the id that the reply's header will carry; a route may
    still change it until the reply starts; ``key_id`` beside it tells keys apart. No key is needed
    for ``public_paths``. ``on_reject`` gets the code of every refused generation.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key_digests: Sequence[str] = (),
        public_paths: Container[str] = PUBLIC_PATHS,
        on_reject: Callable[[str], None] | None = None,
    ):
        self._app = app
        self._key_digests = key_digests
        self._public_paths = public_paths
        self._on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["key_id"] = ""
        state["request_id"] = valid_request_id(headers.get("x-request-id")) or uuid.uuid4().hex
        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        try:
            if scope["path"] not in self._public_paths:
                state["key_id"] = self._check_key(headers)
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            logger.info("request %s: the client left (499)", state["request_id"])
        except Exception as error:
            if has_started:
                raise
            reply = to_api_error(error)
            # Of a 500 or 504 the engine had the request, and counts how it ended.
            was_refused = reply.status not in (500, 504)
            if self._on_reject and scope["path"] in GENERATION_PATHS and was_refused:
                self._on_reject(reply.code)
            await reply.response()(scope, receive, send_named)

    def _check_key(self, headers: Headers) -> str:
        """The id of the key that came, which does not tell it; empty if none is needed."""
        if not self._key_digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Header text is latin-1; every key is compared, so the time taken tells nothing.
        digest = _digest(given.encode("latin-1"))
        found = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if not any(found):
            raise ApiError(
                401,
                "invalid_api_key",
                "no valid key: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest
