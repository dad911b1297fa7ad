"""``skippy-mesh status``: what a running server says of itself, once or again and again."""

from __future__ import annotations

import argparse
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from skippy_mesh.errors import SkippyError, UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from skippy_mesh.status_page import Counts

_ANSWER_S = 10.0
_WATCH_S = 2.0


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", metavar="URL", help="of the server (%(default)s)")
    add("--api-key", default="", metavar="K", help="one of the server's keys, if it needs one")
    add("--watch", action="store_true", help="again every 2 seconds, until interrupted")
    add("--json", action="store_true", help="what the server said, as it is")
    add("--debug", action="store_true", help="show tracebacks")


def show_status(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    server = Server(args.url, args.api_key)
    if args.json:
        print(json.dumps(server.status()), flush=True)
        while args.watch:
            time.sleep(_WATCH_S)
            print(json.dumps(server.status()), flush=True)
        return 0
    console = Console(highlight=False)
    if not args.watch:
        console.print(_page(server, console, None)[0])
        return 0
    if not console.is_terminal:
        for shown in _pages(server, console):
            console.print(shown)
    with Live(console=console, auto_refresh=False) as live:
        for shown in _pages(server, console):
            live.update(shown, refresh=True)
    return 0


class Server:
    """A server at ``url``, which may be given as ``host:port`` or with the API's ``/v1``."""

    def __init__(self, url: str, api_key: str = ""):
        full = url if "://" in url else f"http://{url}"
        self.url = full.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"--url takes http://HOST:PORT, got {url!r}")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def status(self) -> dict[str, Any]:
        """:class:`SkippyError`, one line, if there is none to be had."""
        try:
            found = json.loads(self._get("/status"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or "state" not in found:
            raise SkippyError(f"what answers at {self.url} is no skippy_mesh server")
        return found

    def counts(self) -> Counts | None:
        """What adds up, None where it is not told."""
        from prometheus_client.parser import text_string_to_metric_families

        from skippy_mesh.status_page import Counts

        try:
            families = list(text_string_to_metric_families(self._get("/metrics").decode()))
        except (SkippyError, ValueError):
            return None
        samples = [sample for family in families for sample in family.samples]
        tokens = {
            sample.labels["phase"]: sample.value
            for sample in samples
            if sample.name == "skippy:step_tokens_total"
        }
        prefix = {
            sample.labels["result"]: sample.value
            for sample in samples
            if sample.name == "skippy:prefix_tokens_total"
        }
        return Counts(time.monotonic(), tokens, prefix.get("hit", 0), prefix.get("queried", 0))

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as reply:
                body: bytes = reply.read()
                return body
        except urllib.error.HTTPError as error:
            raise SkippyError(self._refusal(error)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise SkippyError(
                f"nobody answers at {self.url} ({reason}): is skippy-mesh serve running there? "
                f"--url says where"
            ) from error

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        with error:
            if error.code == 401:
                return f"the server at {self.url} wants a key: --api-key, or SKIPPY_API_KEY"
            try:
                reason = str(json.loads(error.read())["error"]["message"])
            except (OSError, ValueError, KeyError, TypeError):
                reason = "no skippy_mesh server, or not at this path"
        return f"the server at {self.url} answers {error.code}: {reason}"


def _page(
    server: Server, console: Console, before: Counts | None
) -> tuple[RenderableType, Counts | None]:
    from skippy_mesh.status_page import page

    document, counts = server.status(), server.counts()
    is_ascii = not console.encoding.startswith("utf")
    shown = page(document, server.url, counts=counts, before=before, is_ascii=is_ascii)
    return shown, counts


def _pages(server: Server, console: Console) -> Iterator[RenderableType]:
    """One after another; where nobody answers, who does not."""
    from rich.text import Text

    before = None
    while True:
        try:
            shown, before = _page(server, console, before)
        except SkippyError as error:
            shown, before = Text(str(error), "red"), None
        yield shown
        time.sleep(_WATCH_S)
