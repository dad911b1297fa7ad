"""A line of the log for each request that ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.streaming import Answer
from skippy_mesh.messages import Request

logger = logging.getLogger(__name__)


class RequestLog:
    """Prompts and answers are in it only where the operator said so (``shows_text``)."""

    def __init__(self, tokenizer: Tokenizer, *, shows_text: bool):
        self._tokenizer = tokenizer
        self.shows_text = shows_text

    def tell(self, request_id: str, requests: Sequence[Request], answer: Answer) -> None:
        """What became of ``requests``, the choices of one reply."""
        if not logger.isEnabledFor(logging.INFO):
            return
        spent, times = answer.spent, answer.times
        num_prompt = sum(len(request.token_ids) for request in requests[:: answer.num_samples])
        first_s = min((each.first_token_s or 0.0 for each in times), default=0.0)
        logger.info(
            "request %s: %d prompt tokens (%d cached), %d tokens, %s; first after %.2f s, %.2f s",
            request_id, num_prompt, spent.num_cached, spent.num_output,
            ", ".join(end or "left" for end in answer.ends),
            first_s, time.monotonic() - min(each.submitted_s for each in times),
        )  # fmt: skip
        if self.shows_text:
            for request, text in zip(requests, answer.texts, strict=True):
                pieces = [self._tokenizer.piece(id_, special=True) for id_ in request.token_ids]
                prompt = b"".join(pieces).decode(errors="replace")
                logger.info("request %s: prompt %r, answer %r", request_id, prompt, text)
