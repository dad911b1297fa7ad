"""The child of :mod:`stages.grammar_compiler`: tries grammars on the model's vocabulary; some of
them end it.

One JSON object a line: ``{"kind": "gbnf", "json_schema" or "tool_calls", "text": ...}`` in,
``{"gbnf": ...}`` or ``{"error": ...}`` out, after a first empty object when it is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import numpy as np

from skippy_mesh.errors import StageError
from stages.grammar import MAX_GRAMMAR_BYTES, Grammar
from stages.native import last_error
from stages.schema_grammar import calls_to_gbnf, schema_to_gbnf
from stages.tokenizer import Tokenizer

# A stage has eight times this. What overflows it ends this process and not that one.
_STACK_BYTES = 1 << 20
_EXTRA_MEMORY_BYTES = 1 << 30
_MAX_S = 30  # whoever asked gives up long before, unless it is dead
_WALK_TOKENS, _WALK_S, _WALK_CHOICES = 64, 0.25, 512
_MAX_REASON_CHARS = 160
_CONVERTERS: dict[str, Callable[[Any], str]] = {
    "json_schema": schema_to_gbnf,
    "tool_calls": calls_to_gbnf,
}


class Tester:
    def __init__(self, model_path: str, errors: IO[bytes]):
        self._tokenizer = Tokenizer(model_path)
        self._errors = errors  # where the native side prints what it makes of a grammar

    def answer(self, line: str) -> dict[str, str]:
        request = json.loads(line)
        text: str = request["text"]
        try:
            if (convert := _CONVERTERS.get(request["kind"])) is not None:
                text = convert(json.loads(text))
            if len(text.encode()) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"it makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes")
            self._try(text)
        except StageError:
            return {"error": self._reason()}
        except RecursionError:
            return {"error": "it is nested too deeply"}
        except Exception as error:  # the converter meets a faulty schema in any way
            return {"error": str(error)[:_MAX_REASON_CHARS] or type(error).__name__}
        return {"gbnf": text}

    def _try(self, text: str) -> None:
        """Compile ``text``, offer it the vocabulary, and go on with tokens at random: what grows
        without bounds or dies does it here."""
        self._errors.seek(0)
        self._errors.truncate()
        grammar = Grammar(self._tokenizer, text)
        draw = np.random.default_rng(0)
        logits = np.zeros(self._tokenizer.num_tokens, np.float32)
        if not np.isfinite(grammar.masked(logits)).any():
            raise ValueError("no token of this model can begin it")
        end_s = time.monotonic() + _WALK_S
        for _ in range(_WALK_TOKENS):
            ids = draw.choice(len(logits), min(_WALK_CHOICES, len(logits)), replace=False)
            allowed = grammar.allowed(ids.astype(np.int32))
            if not len(allowed):
                allowed = grammar.allowed(np.arange(len(logits), dtype=np.int32))
            if not len(allowed) or time.monotonic() > end_s:
                break
            token = int(draw.choice(allowed))
            if token in self._tokenizer.eog_ids:
                break
            grammar.take(token)
        grammar.close()

    def _reason(self) -> str:
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace").strip().splitlines()
        reason = printed[0].removeprefix("parse: error parsing grammar: ") if printed else ""
        return (reason or last_error())[:_MAX_REASON_CHARS]


def main(model_path: str) -> None:
    with tempfile.TemporaryFile() as errors, os.fdopen(os.dup(1), "w") as answers:
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno(), 1)
        tester = Tester(model_path, errors)
        _limit_memory()
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            signal.alarm(_MAX_S)
            answer = tester.answer(line)
            signal.alarm(0)
            print(json.dumps(answer), file=answers, flush=True)


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # not every system can
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _EXTRA_MEMORY_BYTES, hard))


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=main, args=(sys.argv[1],))
    thread.start()
    thread.join()
