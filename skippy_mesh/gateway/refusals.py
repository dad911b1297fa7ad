"""What a client is told that may not come in, or waited too long, and what the limit was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from skippy_mesh.errors import CoordinatorLostError, RequestError
from skippy_mesh.gateway.errors import ApiError, refused, unavailable
from skippy_mesh.gateway.places import PlaceRefusedError
from skippy_mesh.mesh_facts import Bound
from skippy_mesh.messages import Request
from skippy_mesh.places import retry_after_s


@dataclass(slots=True)
class Bounds:
    """What binds how many requests may run, and how many tokens one may have, as it is just now."""

    ceiling: Bound
    context: Bound

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """What the coordinator answers, in the words of HTTP."""
        try:
            yield
        except PlaceRefusedError as error:
            refusal = error.refusal
            raise refused(
                refusal.code,
                refusal.message,
                retry_after_s=refusal.retry_after_s,
                limit_by=_limit_by(self.ceiling),
            ) from None
        except CoordinatorLostError as error:
            raise unavailable("coordinator_lost", str(error)) from None

    def waited_too_long(self, limit_s: float) -> ApiError:
        return refused(
            "queue_timeout",
            f"it waited {limit_s:g} s, the limit of this server, and did not come to run",
            retry_after_s=retry_after_s(limit_s),
            limit_by=_limit_by(self.ceiling),
        )

    def check_fits(self, request: Request, max_model_len: int, *, field: str) -> None:
        """Refuse at once what can never run; ``field`` is where the prompt came from."""
        try:
            request.check_fits(max_model_len)
        except RequestError as error:
            raise ApiError(
                400,
                error.code,
                str(error),
                param=field,
                details={
                    "n_prompt_tokens": len(request.token_ids),
                    "n_ctx": max_model_len,
                    "limit_by": _limit_by(self.context),
                },
            ) from None


def _limit_by(bound: Bound) -> dict[str, object]:
    return {"stage": bound.stage, "component": bound.component, "term": bound.term}
