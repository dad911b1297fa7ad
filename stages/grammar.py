"""Where one request is in its grammar, by llama.cpp's own matcher.

The native side throws on a token the grammar does not allow, which ends the process. So every token
is asked about before it is accepted, and only grammars that :mod:`stages.grammar_compiler` has
tried in a child process may come here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import llama_cpp
import numpy as np

from skippy_mesh.errors import StageError
from stages.batch import Floats
from stages.candidates import Candidates, Ids
from stages.tokenizer import Tokenizer, begins_text

MAX_GRAMMAR_BYTES = 64 << 10
_ROOT = b"root"


class Grammar:
    """``text`` is GBNF over the vocabulary of ``tokenizer``; ``outputs`` are the tokens so far.

    Control tokens have no visible text, but a matcher takes their names for it: unless the grammar
    names one, none is allowed. Nor is a token that makes bytes no character: the matcher takes
    overlong forms for what they stand for.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, outputs: Iterable[int] = ()):
        self._tokenizer = tokenizer  # the vocabulary must outlive the native side
        self._native: int | None = llama_cpp.llama_sampler_init_grammar(
            tokenizer.vocab, text.encode(), _ROOT
        )
        if not self._native:
            raise StageError("llama.cpp refuses the grammar")
        self._hidden = np.zeros(tokenizer.num_tokens, np.bool_)
        self._hidden[[id_ for name, id_ in tokenizer.hidden_ids.items() if name not in text]] = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in outputs:
            if not self.take(token):
                self.close()
                raise StageError(f"token {token} does not continue the grammar")

    def take(self, token: int) -> bool:
        """Go on behind ``token`` if it may come next; whether it may. An end of generation may
        once the grammar is complete."""
        if not len(self.allowed(np.array([token], np.int32))):
            return False
        llama_cpp.llama_sampler_accept(self._native, token)
        self._decoder.decode(self._tokenizer.piece(token))
        return True

    def allowed(self, ids: Ids) -> Ids:
        """Those of ``ids`` that may come next, in their order."""
        return ids[np.isfinite(self._kept(ids, np.zeros(len(ids), np.float32)))]

    def masked(self, logits: Floats) -> Floats:
        """A copy of float32 ``[n_vocab]`` with -inf for every token that may not come next."""
        return self._kept(np.arange(len(logits), dtype=np.int32), logits)

    def close(self) -> None:
        if self._native:
            llama_cpp.llama_sampler_free(self._native)
            self._native = None

    def _kept(self, ids: Ids, logits: Floats) -> Floats:
        candidates = Candidates(ids, logits)
        assert self._native is not None
        candidates.apply(self._native)
        kept: Floats = candidates.rows["logit"].copy()
        kept[self._hidden[ids]] = -np.inf
        unfinished = self._decoder.getstate()[0]
        if not unfinished:
            kept[self._tokenizer.is_broken[ids]] = -np.inf
        else:
            for place in np.flatnonzero(np.isfinite(kept)):  # those that finish it: few
                piece = self._tokenizer.piece(int(ids[place]))
                if not piece or not begins_text(unfinished + piece):
                    kept[place] = -np.inf
        return kept
