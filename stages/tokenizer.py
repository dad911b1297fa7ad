"""The model's own tokenizer, chat template and end-of-generation set, read from its GGUF.

Loads the vocabulary only: no weights, no context.
"""

from __future__ import annotations

import codecs
import ctypes
from functools import cached_property

import llama_cpp
import numpy as np
import numpy.typing as npt

from skippy_mesh.errors import ModelFileError
from stages.native import load_library

_MAX_PIECE_BYTES = 1 << 20


class Tokenizer:
    """Text to token ids and back. Safe to share between threads once built."""

    def __init__(self, model_path: str, *, chat_template: str | None = None):
        """``chat_template`` stands for the file's own."""
        load_library()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(model_path.encode(), params)
        if not self._model:
            raise ModelFileError(f"{model_path}: llama.cpp cannot read its vocabulary")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.num_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.max_trained_tokens: int = llama_cpp.llama_model_n_ctx_train(self._model)
        self._pieces: dict[int, bytes] = {}
        self._chat_template = chat_template

    @property
    def vocab(self) -> int:
        """llama.cpp's own, which lives as long as this."""
        return int(self._vocab)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``. ``add_special`` adds BOS (or EOS) where the model's metadata says
        so; ``parse_special`` lets control tokens written in the text become those tokens."""
        data = text.encode()
        room = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            count = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), ids, room, add_special, parse_special
            )
            if count >= 0:
                return list(ids[:count])
            room = -count

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes ``token_id`` stands for; control tokens are empty unless ``special``."""
        if special:
            return self._piece(token_id, special=True)
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._piece(token_id, special=False)
        return found

    def _piece(self, token_id: int, *, special: bool) -> bytes:
        if not 0 <= token_id < self.num_tokens:
            raise ValueError(f"token id {token_id} is not in [0, {self.num_tokens})")
        room = 64
        while room <= _MAX_PIECE_BYTES:
            buffer = ctypes.create_string_buffer(room)
            count = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        raise ValueError(f"token id {token_id} has a piece of {room} bytes")

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation; a model may have several."""
        return frozenset(
            token
            for token in range(self.num_tokens)
            if llama_cpp.llama_vocab_is_eog(self._vocab, token)
        )

    @cached_property
    def is_broken(self) -> npt.NDArray[np.bool_]:
        """For every token, whether its bytes cannot stand behind a whole character."""
        pieces = map(self.piece, range(self.num_tokens))
        return np.fromiter((not begins_text(piece) for piece in pieces), np.bool_)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of all control tokens, which user text must not be able to forge.

        Not the user-defined ones: llama.cpp finds those in any text, whatever it is told.
        """
        return tuple(filter(None, self._control.values()))

    @cached_property
    def hidden_ids(self) -> dict[str, int]:
        """Control tokens that do not end a generation, by name."""
        eog = self.eog_ids
        return {text: token for token, text in self._control.items() if token not in eog}

    @cached_property
    def _control(self) -> dict[int, str]:
        return {
            token: self._piece(token, special=True).decode(errors="replace")
            for token in range(self.num_tokens)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token)
            & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        }

    @cached_property
    def chat_template(self) -> str | None:
        if self._chat_template is not None:
            return self._chat_template
        found = llama_cpp.llama_model_chat_template(self._model, None)
        return found.decode() if found else None

    @cached_property
    def bos_text(self) -> str:
        return self._text_of(llama_cpp.llama_vocab_bos(self._vocab))

    @cached_property
    def eos_text(self) -> str:
        return self._text_of(llama_cpp.llama_vocab_eos(self._vocab))

    def _text_of(self, token_id: int) -> str:
        return "" if token_id < 0 else self._piece(token_id, special=True).decode(errors="replace")


def begins_text(data: bytes) -> bool:
    """Whether ``data`` is valid UTF-8, its last character perhaps incomplete."""
    try:
        _, num_whole = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    # Of surrogates Python finds out with the third byte only.
    return not (data[num_whole : num_whole + 1] == b"\xed" and data[num_whole + 1 :] >= b"\xa0")
