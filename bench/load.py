"""The one HTTP load generator: it sends streaming completions and writes down what came when."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from bench.records import Record, Run
from skippy_mesh.errors import UsageError

# Everyday words: nearly every vocabulary has each as one token with its leading space.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every request asks for. Same seed and index, same prompt, for whichever engine."""

    prompt_tokens: int = 128  # wished for; what the server counted is in the records
    output_tokens: int = 64  # exact: end-of-text is masked, so all engines do equal work
    shared_tokens: int = 0  # of prompt_tokens, the first ones, the same in all prompts
    uses_cache: bool = False
    seed: str = "0"

    def prompt(self, index: int) -> str:
        """Random words, so that no two prompts share a prefix that a cache could skip, but for the
        one they are meant to share."""
        shared = random.Random(f"{self.seed}/shared").choices(WORDS, k=self.shared_tokens)
        draw = random.Random(f"{self.seed}/{index}")
        return " ".join(shared + draw.choices(WORDS, k=self.prompt_tokens - self.shared_tokens))

    def body(self, index: int) -> dict[str, object]:
        return {
            "prompt": self.prompt(index),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": self.uses_cache,
        }


@dataclass(slots=True)
class Stream:
    """What one answer has said so far, fed line by line."""

    chunk_times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None

    def feed(self, line: str, now_s: float) -> None:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return  # comments keep the connection alive; the end is checked by what came before
        frame = json.loads(data)
        if "error" in frame:
            self.error = f"error in the stream: {frame['error'].get('message')}"
        self.usage = frame.get("usage") or self.usage
        for choice in frame.get("choices", ()):
            if choice.get("text"):
                self.chunk_times_s.append(now_s)
                self.texts.append(choice["text"])
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def verdict(self, output_tokens: int) -> str | None:
        """Why an answer that ended is not a whole one."""
        if self.error is not None:
            return self.error
        if self.finish_reason is None:
            return "the stream ended without a finish reason"
        if not {"prompt_tokens", "completion_tokens"} <= self.usage.keys():
            return "the stream carried no usage"
        if self.usage["completion_tokens"] != output_tokens:
            return f"{self.usage['completion_tokens']} tokens came, {output_tokens} were asked for"
        return None if self.texts else "no text came"


def check_loopback(url: str) -> None:
    """The bench overloads what it talks to, so it talks to this machine only."""
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise UsageError(f"the load generator only talks to this machine, not to {url}")


async def send(
    client: httpx.AsyncClient, workload: Workload, index: int, *, scheduled_s: float, until_s: float
) -> Record:
    """One streaming completion, given up at ``until_s``. Every ending becomes a record."""
    stream, is_cut = Stream(), False
    body = workload.body(index)
    sent_s = time.monotonic()
    try:
        async with (
            asyncio.timeout(until_s - sent_s),
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            if reply.status_code == 200:
                async for line in reply.aiter_lines():
                    stream.feed(line, time.monotonic())
                stream.error = stream.verdict(workload.output_tokens)
            else:
                detail = (await reply.aread()).decode(errors="replace")
                stream.error = f"HTTP {reply.status_code}: {detail[:200]}"
    except TimeoutError:
        is_cut = True
    except (httpx.HTTPError, ValueError) as failure:
        stream.error = stream.error or f"{type(failure).__name__}: {failure}"
    return Record(
        index=index,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        end_s=time.monotonic(),
        chunk_times_s=tuple(stream.chunk_times_s),
        prompt_tokens=stream.usage.get("prompt_tokens"),
        completion_tokens=stream.usage.get("completion_tokens"),
        finish_reason=stream.finish_reason,
        text="".join(stream.texts),
        error=stream.error,
        is_cut=is_cut and stream.error is None,
    )


def run_requests(
    url: str, workload: Workload, *, clients: int, requests: int, limit_s: float, first: int = 0
) -> Run:
    """So many requests in a closed loop; what is open after ``limit_s`` is cut."""
    return asyncio.run(
        closed_loop(
            url,
            workload,
            num_clients=clients,
            max_requests=requests,
            send_s=limit_s,
            drain_s=0,
            first_index=first,
        )
    )


async def closed_loop(
    url: str,
    workload: Workload,
    *,
    num_clients: int,
    max_requests: int,
    send_s: float,
    drain_s: float,
    first_index: int = 0,
) -> Run:
    """``num_clients`` clients, each sends its next request when its last one ended.

    Nothing new is sent after ``max_requests`` or ``send_s``; what is open then has ``drain_s`` to
    finish before it is cut. The requests are those of ``first_index`` on.
    """
    check_loopback(url)
    indices = iter(range(first_index, first_index + max_requests))
    records: list[Record] = []
    cpu_s, start_s = time.process_time(), time.monotonic()

    async def one_client(client: httpx.AsyncClient) -> None:
        while (now_s := time.monotonic()) < start_s + send_s:
            index = next(indices, None)
            if index is None:
                return
            until_s = start_s + send_s + drain_s
            records.append(await send(client, workload, index, scheduled_s=now_s, until_s=until_s))

    # No proxy from the environment and no pool limit: the client must not queue by itself. Each
    # request has its own connection: a kept one may be closed by the server at the very moment it
    # is used again, which would count as a failure that no user would see.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(num_clients):
            clients.create_task(one_client(client))
    wall_s = time.monotonic() - start_s
    share = (time.process_time() - cpu_s) / wall_s
    return Run(records=sorted(records, key=lambda r: r.index), client_cpu_share=share)
