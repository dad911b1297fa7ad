"""Who may start from whose prefix: a namespace for each key and salt, which nobody can name.

A hit shows in ``cached_tokens`` and in the time to the first token, so whoever shares a namespace
can find out, by guessing, what others have asked. A client's ``cache_salt`` narrows the namespace
of its key and never widens it.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from skippy_mesh.config import PrefixRule
from skippy_mesh.gateway.body import Body

_KINDS = {"any": "seq_cp", "boundary": "state", "none": "none"}
_SECRET_BYTES = 32
_SALT = re.compile(r"[^@/\\\0]{1,128}")


def _check_salt(value: Any) -> Any:
    if isinstance(value, str) and not _SALT.fullmatch(value):
        raise PydanticCustomError(
            "invalid_value", "must have 1 to 128 characters, none of them @, /, \\ or NUL"
        )
    return value


class Cached(Body):
    """The fields that say whether, and with whom, a request shares."""

    cache_salt: Annotated[str | None, BeforeValidator(_check_salt)] = None
    cache_prompt: bool = True


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET_BYTES)


@dataclass(frozen=True, slots=True)
class Sharing:
    """``rule`` is what the mesh can share (:class:`skippy_mesh.config.StepRules`); gateways with
    one ``secret`` have the same namespaces."""

    rule: PrefixRule = "any"
    secret: bytes = field(default_factory=new_secret, repr=False)

    @property
    def needs_history(self) -> bool:
        """Whether the engine must be told where a conversation's history ends."""
        return self.rule == "boundary"

    def kind(self, num_cached: int) -> str:
        """How a request came by ``num_cached`` tokens."""
        return _KINDS[self.rule] if num_cached else "none"

    def namespace(self, key_id: str, salt: str | None) -> str:
        """Of requests with this key, ``""`` where none is needed. No part can hold a NUL."""
        name = f"{key_id}\0{salt or ''}".encode()
        return hmac.digest(self.secret, name, "sha256").hex()
