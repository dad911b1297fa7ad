"""The requests a gateway is working on, by the ids their clients know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from skippy_mesh.gateway.errors import ApiError, valid_request_id
from skippy_mesh.gateway.token_stream import TokenStream

_REPLY_PREFIXES = ("chatcmpl-", "cmpl-")


@dataclass(slots=True)
class _Open:
    key_id: str
    tokens: TokenStream | None = None
    is_aborted: bool = False


class OpenRequests:
    """Names and aborts. On the event loop, where nothing else is said."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def add(self, http: Request, name_in_body: object) -> str:
        """The final id of a new request, unique here; its reply's header carries it."""
        name: str = http.state.request_id
        if valid_request_id(http.headers.get("x-request-id")) is None:
            name = valid_request_id(name_in_body) or name
        final, number = name, 1
        while final in self._open:
            number += 1
            final = f"{name}-{number}"
        http.state.request_id = final
        self._open[final] = _Open(http.state.key_id)
        return final

    def start(self, request_id: str, tokens: TokenStream) -> None:
        """The engine has it from now on."""
        found = self._open[request_id]
        found.tokens = tokens
        if found.is_aborted:
            tokens.end_all()

    def refuse_waiting(self, error: ApiError) -> None:
        """Whatever is still in the queue gets ``error``. Any thread."""
        for found in list(self._open.values()):
            if found.tokens is not None:
                found.tokens.refuse(error)

    def discard(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def abort(self, names: Sequence[str], *, key_id: str) -> tuple[list[str], list[str]]:
        """End those of this key; which of ``names``, ids of replies or bare ones, were open and
        which are not known."""
        aborted: list[str] = []
        unknown: list[str] = []
        for name in names:
            found = self._find(name)
            if found is None or found.key_id != key_id:
                unknown.append(name)
                continue
            found.is_aborted = True
            if found.tokens is not None:
                found.tokens.end_all()
            aborted.append(name)
        return aborted, unknown

    def _find(self, name: str) -> _Open | None:
        bare = (name.removeprefix(prefix) for prefix in _REPLY_PREFIXES if name.startswith(prefix))
        return next((self._open[each] for each in (name, *bare) if each in self._open), None)
