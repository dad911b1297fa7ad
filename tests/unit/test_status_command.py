"""``skippy-mesh status`` on what a server says. Without these it shows what the server does not
know, or a traceback where nobody answers."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from skippy_mesh.cli import main
from skippy_mesh.status_page import Counts, bar, page

DOCUMENT = {
    "state": "ready",
    "captured_at": 0.0,
    "model": "tiny [bold]",
    "stages": [
        {
            "index": 0, "layers": [0, 15], "node": "host-a", "epoch": 2, "lease_age_s": 0.31,
            "last_reply_age_s": 12.5,
            "components": {
                "lanes": {"cells": 32},
                "attention": {
                    "cells": 8192, "active": 1000, "resident": 3096, "reserved": 0, "free": 4096,
                },
            },
        },
        {
            "index": 1, "layers": [15, 30], "node": "host-b",
            "components": {"lanes": {"cells": 32}, "recurrent": {"cells": 40}},
        },
    ],
    "exact": {"value": False, "reason": "switched off (--exact off)"},
    "ceiling": {"value": 32, "stage": "0", "component": "attention", "term": "8192 cells / 256"},
    "queue": {"requests": 5, "tokens": 1234, "oldest_s": 2.04},
    "running": 7,
    "preempted": 1,
    "insecure_bind": True,
    "config": {"port": 8000},
}  # fmt: skip
METRICS = """\
# TYPE skippy:step_tokens counter
skippy:step_tokens_total{model_name="m",phase="prefill"} 300
skippy:step_tokens_total{model_name="m",phase="decode"} 1500
# TYPE skippy:prefix_tokens counter
skippy:prefix_tokens_total{model_name="m",result="hit"} 50
skippy:prefix_tokens_total{model_name="m",result="queried"} 200
"""


def text_of(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_page_says_who_runs_what_binds_and_why_not_exact():
    text = text_of(page(DOCUMENT, "http://h:1"))
    for part in (
        "tiny [bold] is ready at http://h:1",
        "running 7, waiting 5 (1,234 prompt tokens, the first for 2.0 s), preempted 1",
        "ceiling 32, bound by attention of stage 0: 8192 cells / 256",
        "exact no: switched off (--exact off)",
        "whoever reaches it may ask",
        "0.3 s ago", "12.5 s ago", "host-a", "0:15", "4,096 of 8,192", "- of 40",
    ):  # fmt: skip
        assert part in text, text


def test_what_is_not_known_is_not_made_up():
    known = {key: DOCUMENT[key] for key in ("state", "model", "stages")}
    text = text_of(page({**known, "state": "failed", "problem": "stage 1 is gone"}, "http://h:1"))
    assert "not serving: stage 1 is gone" in text
    for word in ("running", "waiting", "ceiling", "exact", "tokens"):
        assert word not in text
    (row,) = [line for line in text.splitlines() if "host-b" in line]
    assert row.split()[:6] == ["1", "15:30", "host-b", "-", "32", "-"]


def test_an_operators_ceiling_is_of_all_stages():
    ceiling = {"value": 4, "stage": "all", "component": "lanes", "term": "operator"}
    text = text_of(page({**DOCUMENT, "ceiling": ceiling}, "http://h:1"))
    assert "ceiling 4, bound by lanes of all stages: operator" in text


@pytest.mark.parametrize(
    ("counts", "marks"),
    [
        ({"active": 0, "resident": 0, "reserved": 0}, "." * 16),
        ({"active": 50, "resident": 25, "reserved": 25}, "#" * 8 + "=" * 4 + "-" * 4),
        ({"active": 1}, "#" + "." * 15),
        ({"reserved": 1}, "-" + "." * 15),
    ],
)
def test_a_bar_is_as_long_as_the_cells_and_shows_the_least(counts, marks):
    assert bar(counts, 100, is_ascii=True).plain == marks


def test_rates_are_between_two_looks_and_totals_before():
    now = Counts(10.0, {"decode": 1500, "prefill": 300}, 50, 200)
    alone = text_of(page(DOCUMENT, "u", counts=now))
    assert "tokens so far: decode 1,500, prefill 300" in alone
    assert "from the prefix cache: 50 (25%)" in alone
    before = Counts(8.0, {"decode": 1400, "prefill": 300}, 0, 0)
    both = text_of(page(DOCUMENT, "u", counts=now, before=before))
    assert "tokens a second: decode 50.0, prefill 0.0" in both


@contextlib.contextmanager
def answering(replies):
    """A server that knows some paths, and wants a key where the reply is one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            code, body = replies.get(self.path, (404, b"{}"))
            if isinstance(body, str):
                is_known = self.headers.get("Authorization") == f"Bearer {body}"
                code, body = (200, json.dumps(DOCUMENT).encode()) if is_known else (401, b"{}")
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


WELL = {"/status": (200, json.dumps(DOCUMENT).encode()), "/metrics": (200, METRICS.encode())}


def test_the_command_shows_the_page_and_what_adds_up(capsys):
    with answering(WELL) as url:
        assert main(["status", "--url", f"{url}/v1/"]) == 0
    out, err = capsys.readouterr()
    assert "is ready at" in out and "tokens so far: prefill 300, decode 1,500" in out
    assert err == ""


def test_a_server_without_metrics_is_shown_without_them(capsys):
    with answering({"/status": WELL["/status"]}) as url:
        assert main(["status", "--url", url.removeprefix("http://")]) == 0
    assert "tokens so far" not in capsys.readouterr().out


def test_json_is_what_the_server_said(capsys):
    with answering(WELL) as url:
        assert main(["status", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT


def test_a_key_is_sent_and_its_lack_is_named(capsys, monkeypatch):
    with answering({"/status": (0, "secret")}) as url:
        assert main(["status", "--url", url, "--api-key", "wrong"]) == 1
        assert "--api-key, or SKIPPY_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("SKIPPY_API_KEY", "secret")
        assert main(["status", "--url", url]) == 0


LOADING = json.dumps({"error": {"message": "Loading model", "code": "loading"}}).encode()


@pytest.mark.parametrize(
    ("reply", "needle"),
    [
        ((503, LOADING), "answers 503: Loading model"),
        ((404, b"<html>"), "answers 404"),
        ((200, b"[]"), "no skippy_mesh server"),
        ((200, b"<html>"), "no skippy_mesh server"),
    ],
)
def test_another_answer_is_one_line(reply, needle, capsys):
    with answering({"/status": reply}) as url:
        assert main(["status", "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and needle in err and url in err


def test_nobody_there_is_one_line(capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert main(["status", "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"skippy-mesh: nobody answers at {url} (") and err.count("\n") == 1


def test_an_address_of_no_web_is_bad_usage(capsys):
    assert main(["status", "--url", "ftp://h"]) == 2
    assert "ftp://h" in capsys.readouterr().err
