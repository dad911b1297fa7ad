"""The two generation endpoints, and an end to what they began.

The life of a request: read the body, check it, take a place, render and tokenise off the event
loop, count the tokens, submit to the engine, answer. Nothing is sent before the first output or
error, so every refusal is a real HTTP status.

A request for several answers, or to several prompts, is a group: it takes one place, stands in the
queue as one, and ends as one. To the engine its members are requests like any other, one behind
the other, so that one prompt is computed once and shared, and memory pressure takes no more of the
group than it must.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from skippy_mesh.client import EngineClient
from skippy_mesh.errors import RequestError, SkippyError
from skippy_mesh.gateway.about import About
from skippy_mesh.gateway.body import Body
from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.constraints import Constraint, GrammarCompiler, Grammars
from skippy_mesh.gateway.errors import timed_out, unavailable
from skippy_mesh.gateway.open_requests import OpenRequests
from skippy_mesh.gateway.parsing import BodyParser
from skippy_mesh.gateway.places import Place, Places
from skippy_mesh.gateway.prefixes import Sharing
from skippy_mesh.gateway.prompts import Prompt, Prompts
from skippy_mesh.gateway.readiness import DRAINING, Readiness
from skippy_mesh.gateway.refusals import Bounds
from skippy_mesh.gateway.replies import Reply
from skippy_mesh.gateway.request_log import RequestLog
from skippy_mesh.gateway.rules import ApiRules
from skippy_mesh.gateway.schemas import ChatBody, CompletionBody, GenerationBody, StreamOptions
from skippy_mesh.gateway.streaming import Answer, EventStream, unless_gone
from skippy_mesh.gateway.text import Choice
from skippy_mesh.gateway.texts import Read
from skippy_mesh.gateway.token_stream import Limits, TokenStream
from skippy_mesh.gateway.tools import ToolUse
from skippy_mesh.messages import Request as EngineRequest
from skippy_mesh.messages import SamplingParams

_SEED_BITS = 53  # what a client in JavaScript can echo without rounding
_MAX_ABORTS = 1024


class AbortBody(Body):
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class _Job:
    """A checked body and what is to be done with it."""

    http: Request
    body: GenerationBody
    encode: Callable[[], list[Prompt]]
    constraint: Constraint | None
    use: ToolUse | None = None


class Generation:
    """The routes. ``read`` gives the bytes of a body, within the limit of this server; ``on_stall``
    hears of every stream that was ended because nobody read it."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        prompts: Prompts,
        *,
        model_name: str,
        about: About,
        readiness: Readiness,
        places: Places,
        bounds: Bounds,
        limits: Limits,
        sharing: Sharing,
        rules: ApiRules,
        read: Read,
        on_stall: Callable[[], None],
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._grammars = Grammars(grammars)
        self._prompts = prompts
        self._model_name = model_name
        self._about = about
        self._readiness = readiness
        self._places = places
        self._bounds = bounds
        self._limits = limits
        self._sharing = sharing
        self._rules = rules
        self._read = read
        self._on_stall = on_stall
        self._log = RequestLog(tokenizer, shows_text=rules.logs_prompts)
        self._open = OpenRequests()
        self._parser = BodyParser(defaults=rules.defaults, is_strict=rules.is_strict_field)
        chat_limit = {} if rules.max_chat_tokens is None else {"n_predict": rules.max_chat_tokens}
        self._chat_parser = replace(self._parser, defaults={**rules.defaults, **chat_limit})

    async def chat_completions(self, http: Request) -> Response:
        self._readiness.refuse()
        body = self._chat_parser.parse(ChatBody, await self._read(http))
        use = body.tool_use(self._tokenizer.chat_template, self._rules.tool_parser)
        constraint = (use and use.constraint) or body.constraint
        encode = functools.partial(self._prompts.of_chat, body, use)
        return await self._complete(_Job(http, body, encode, constraint, use))

    async def completions(self, http: Request) -> Response:
        self._readiness.refuse()
        body = self._parser.parse(CompletionBody, await self._read(http))
        encode = functools.partial(self._prompts.of_completion, body)
        return await self._complete(_Job(http, body, encode, body.constraint))

    async def abort(self, http: Request) -> Response:
        body = self._parser.parse(AbortBody, await self._read(http))
        if len(body.request_ids) > _MAX_ABORTS:
            raise RequestError(
                f"at most {_MAX_ABORTS} ids at once, got {len(body.request_ids)}",
                param="request_ids",
            )
        aborted, unknown = self._open.abort(body.request_ids, key_id=http.state.key_id)
        return JSONResponse({"aborted": aborted, "unknown": unknown})

    def refuse_waiting(self) -> None:
        """This server is about to end: who is still in the queue may ask another. Any thread."""
        self._open.refuse_waiting(DRAINING.error())

    async def _complete(self, job: _Job) -> Response:
        self._check(job.body)
        requests, answer = await self._submit(job)
        try:
            replying = self._reply(job.body, self._new_reply(job, requests), answer)
            return await unless_gone(replying, job.http.receive)
        except BaseException:
            answer.close()
            raise

    def _check(self, body: GenerationBody) -> None:
        """What depends on this server and not on the model's tokens."""
        if self._rules.is_strict_model and body.model:
            self._about.check_name(body.model)
        if body.n > self._rules.max_n:
            raise RequestError(
                f"n is {body.n}, and this server gives {self._rules.max_n} answers at most",
                param="n",
            )
        if body.priority and not self._rules.knows_priority:
            raise RequestError(
                "priority needs a server started with --scheduling-policy priority",
                param="priority",
                code="unsupported_parameter",
            )
        for param, ids in body.named_ids.items():
            self._prompts.check_ids(ids, param=param)

    async def _reply(self, body: GenerationBody, reply: Reply, answer: Answer) -> Response:
        if not body.stream:
            deltas = await answer.whole()
            answer.close()
            return JSONResponse(reply.whole(deltas, answer.spent, answer.times))
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.hold_s):
                first = await answer.next()
        return EventStream(
            reply,
            answer,
            first=first,
            options=body.stream_options or StreamOptions(),
            has_timings=body.timings_per_token,
            limits=self._limits,
            on_stall=self._on_stall,
        )

    def _new_reply(self, job: _Job, requests: Sequence[EngineRequest]) -> Reply:
        body = job.body
        ids = [list(request.token_ids) for request in requests] if body.return_token_ids else None
        return Reply(
            request_id=job.http.state.request_id,
            created=int(time.time()),
            model=self._model_name,
            is_chat=isinstance(body, ChatBody),
            seed=requests[0].sampling.seed,
            num_prompt_tokens=sum(len(request.token_ids) for request in requests[:: body.n]),
            prefix_kind=self._sharing.kind,
            prompt_ids=ids,
        )

    # -- to the engine -----------------------------------------------------------------------------

    async def _submit(self, job: _Job) -> tuple[list[EngineRequest], Answer]:
        """The request on its way. Whatever fails here gives back its place and its id; afterwards
        the stream does, when the engine is done with it."""
        with self._bounds.refusals():
            place = await self._places.take()
        request_id = self._open.add(job.http, job.body.request_id)

        def give_back() -> None:
            self._open.discard(request_id)
            place.end()

        try:
            prompts = await asyncio.to_thread(job.encode)
            grammar = await self._grammars.compiled(job.constraint)
            requests = self._engine_requests(job, request_id, prompts, grammar)
            field = "messages" if isinstance(job.body, ChatBody) else "prompt"
            for request in requests[:: job.body.n]:
                self._bounds.check_fits(request, self._engine.max_model_len, field=field)
            with self._bounds.refusals():
                await place.count(sum(len(prompt.token_ids) for prompt in prompts))
            return requests, self._start(job, request_id, requests, place, give_back)
        except BaseException:
            give_back()
            raise

    def _start(
        self,
        job: _Job,
        request_id: str,
        requests: Sequence[EngineRequest],
        place: Place,
        give_back: Callable[[], None],
    ) -> Answer:
        limits = self._limits
        tokens = TokenStream(
            limits,
            num_choices=len(requests),
            abort=lambda index, reason: self._engine.abort(requests[index].request_id, reason),
            on_start=place.start,
            # Not sooner: until then the engine knows the id, and a new request must not share it.
            on_end=give_back,
        )
        try:
            times = [
                self._engine.submit(
                    request, functools.partial(tokens.put, index), on_start=tokens.start
                )
                for index, request in enumerate(requests)
            ]
        except SkippyError as error:
            raise unavailable("draining", str(error)) from None
        tokens.limit(
            in_queue=self._bounds.waited_too_long(limits.queue_timeout_s),
            in_all=timed_out(limits.request_timeout_s),
        )
        self._open.start(request_id, tokens)
        return Answer(
            tokens, self._choices(job), times,
            num_samples=job.body.n, keeps_text=self._log.shows_text,
            on_close=functools.partial(self._log.tell, request_id, requests),
        )  # fmt: skip

    def _engine_requests(
        self, job: _Job, request_id: str, prompts: Sequence[Prompt], grammar: str
    ) -> list[EngineRequest]:
        """One for each choice: those of a prompt are neighbours, and their seeds follow on."""
        body, eog_ids = job.body, self._tokenizer.eog_ids
        key_id: str = job.http.state.key_id
        sampling = body.sampling(
            eog_ids=eog_ids, draw_seed=lambda: secrets.randbits(_SEED_BITS), grammar=grammar
        )
        first = EngineRequest(
            request_id=request_id,
            token_ids=prompts[0].token_ids,
            max_tokens=body.token_limit,
            # Who needs a key has no say over others.
            priority=max(body.priority, 0) if key_id else body.priority,
            namespace=self._sharing.namespace(key_id, body.cache_salt),
            shares_prefix=body.cache_prompt,
            sampling=sampling,
            stop_token_ids=eog_ids.union(body.stop_token_ids).difference(sampling.suppressed_ids),
        )
        if len(prompts) == body.n == 1:
            return [replace(first, history_end=prompts[0].history_end)]
        return [
            replace(
                first,
                request_id=f"{request_id}#{at * body.n + sample}",  # no client's has a #
                token_ids=prompt.token_ids,
                history_end=prompt.history_end,
                sampling=_with_seed(sampling, sampling.seed + sample),
            )
            for at, prompt in enumerate(prompts)
            for sample in range(body.n)
        ]

    def _choices(self, job: _Job) -> list[Choice]:
        body, use = job.body, job.use
        return [
            Choice(
                self._tokenizer,
                body.text_rules(prefix=echo, shows_special=use is not None and use.shows_special),
                tools=use.parser() if use is not None else None,
            )
            for echo in self._prompts.echoes(body)
            for _ in range(body.n)
        ]


def _with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    """Seeds go round, as 64-bit numbers do."""
    return replace(sampling, seed=(seed + 2**63) % 2**64 - 2**63)
