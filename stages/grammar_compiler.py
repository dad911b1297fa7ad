"""Finds out what a grammar does before it can do it to a stage: in a child process.

llama.cpp's parser and matcher end the process or never return on some grammars: brackets nested
thirty thousand deep overflow the stack, rules that double forty times never end. A grammar that
the child compiled and tried within two seconds may go to the sampler of a stage.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections import OrderedDict

from skippy_mesh.errors import RequestError, RuntimeUnavailableError
from skippy_mesh.sampling import GrammarKind
from stages.grammar import MAX_GRAMMAR_BYTES

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 120.0
_MAX_KNOWN = 256


class GrammarCompiler:
    """Compiles for the vocabulary in the file at ``model_path``. Any thread; one at a time.

    The child is started when the first grammar comes, and again after one that ended it.
    """

    def __init__(self, model_path: str, *, timeout_s: float = _TIMEOUT_S):
        self._model_path = model_path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._known: OrderedDict[tuple[GrammarKind, str], str] = OrderedDict()

    def compile(self, kind: GrammarKind, text: str) -> str:
        """GBNF that a stage can use. :class:`RequestError` ``invalid_grammar`` with the reason if
        there is none."""
        if not text.strip() or "\0" in text:
            raise invalid_grammar("it is empty or holds a NUL")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise invalid_grammar("it is not valid Unicode") from None
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise invalid_grammar(f"it has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are read")
        with self._lock:
            gbnf = self._known.get((kind, text))
            if gbnf is None:
                gbnf = self._ask(kind, text)
                if len(self._known) >= _MAX_KNOWN:
                    self._known.popitem(last=False)
                self._known[kind, text] = gbnf
            self._known.move_to_end((kind, text))
            return gbnf

    def close(self) -> None:
        with self._lock:
            self._end_child()

    def _ask(self, kind: GrammarKind, text: str) -> str:
        child = self._child or self._start()
        answer, how = _exchange(child, json.dumps({"kind": kind, "text": text}), self._timeout_s)
        if answer is None:
            self._end_child()
            logger.warning("a grammar ended the process that tried it: %s", how)
            raise invalid_grammar(f"compiling it {how}")
        fields = json.loads(answer)
        if "error" in fields:
            raise invalid_grammar(fields["error"])
        return str(fields["gbnf"])

    def _start(self) -> subprocess.Popen[str]:
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "stages.grammar_child", self._model_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        answer, how = _exchange(child, None, _START_TIMEOUT_S)
        if answer is None:
            self._end_child()
            raise RuntimeUnavailableError(
                f"the process that tries grammars did not start: it {how}"
            )
        return child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _exchange(
    child: subprocess.Popen[str], line: str | None, timeout_s: float
) -> tuple[str | None, str]:
    """The child's answer to ``line``, or None and what became of the child."""
    assert child.stdin is not None and child.stdout is not None
    too_late = threading.Event()

    def stop() -> None:
        too_late.set()
        child.kill()

    timer = threading.Timer(timeout_s, stop)
    timer.start()
    try:
        if line is not None:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = ""
    finally:
        timer.cancel()
    if answer.endswith("\n"):
        return answer, ""
    if too_late.is_set():
        return None, f"takes longer than {timeout_s:g} s"
    code = child.wait()
    return None, f"ends in {signal.Signals(-code).name}" if code < 0 else f"exits with {code}"


def invalid_grammar(reason: str) -> RequestError:
    return RequestError(f"the grammar cannot be used: {reason}", code="invalid_grammar")
