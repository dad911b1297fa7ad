"""Where one request is in its grammar, by llama.cpp's own matcher.

The native side throws on a token the grammar does not allow, which ends the process. So every token
is asked about before it is accepted, and only grammars that :mod:`stages.grammar_compiler` has
tried in a child process may come here.
"""

from __future__ import annotations

from collections.abc import Iterable

import llama_cpp
import numpy as np

from skippy_mesh.errors import StageError
from stages.batch import Floats
from stages.candidates import Candidates, Ids

ROOT = b"root"


class Grammar:
    """``text`` is GBNF over the vocabulary at ``vocab``; ``outputs`` are the tokens so far.

    ``vocab`` must outlive this.
    """

    def __init__(self, vocab: int, text: str, outputs: Iterable[int] = ()):
        self._native: int | None = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), ROOT)
        if not self._native:
            raise StageError("llama.cpp refuses the grammar")
        for token in outputs:
            self.accept(token)

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next: an end of generation once the grammar is complete."""
        ids = np.array([token], np.int32)
        return bool(np.isfinite(self._kept(ids, np.zeros(1, np.float32))[0]))

    def masked(self, logits: Floats) -> Floats:
        """A copy of float32 ``[n_vocab]`` with -inf for every token that may not come next."""
        return self._kept(np.arange(len(logits), dtype=np.int32), logits)

    def accept(self, token: int) -> None:
        """Go on behind ``token``; :class:`StageError` if it may not come next."""
        if not self.allows(token):
            raise StageError(f"token {token} does not continue the grammar")
        llama_cpp.llama_sampler_accept(self._native, token)

    def close(self) -> None:
        if self._native:
            llama_cpp.llama_sampler_free(self._native)
            self._native = None

    def _kept(self, ids: Ids, logits: Floats) -> Floats:
        candidates = Candidates(ids, logits)
        assert self._native is not None
        candidates.apply(self._native)
        kept: Floats = candidates.rows["logit"]
        return kept
