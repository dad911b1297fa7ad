"""One tokenizer for all families: a token for every byte, so any text goes in and comes out again.

The order and the special tokens are SmolLM2's. After the bytes come pairs of letters, or of a space
and a letter, so that a text has fewer tokens than bytes and a token may be more than a character.
"""

from __future__ import annotations

import itertools
from typing import Any

from gguf import TokenType

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NUM_BYTES = 256
MIN_VOCAB = len(_SPECIAL) + _NUM_BYTES
_LETTERS = "etaoinshrdlucmfwygpbvkxqjzETAOINSHRDLUCMFWYGPBVKXQJZ"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_metadata(num_vocab: int) -> dict[str, Any]:
    """The ``tokenizer.*`` keys of a vocabulary of ``num_vocab`` tokens, the special ones first."""
    letter_of = _byte_letters()
    pairs = [
        (letter_of[ord(first)], letter_of[ord(second)])
        for first, second in itertools.product(f" {_LETTERS}", _LETTERS)
    ][: num_vocab - MIN_VOCAB]
    tokens = [*_SPECIAL, *letter_of, *("".join(pair) for pair in pairs)]
    if len(tokens) != num_vocab:
        raise ValueError(f"num_vocab is {num_vocab}, not in [{MIN_VOCAB}, {len(tokens)}]")
    kinds = [TokenType.CONTROL] * len(_SPECIAL) + [TokenType.NORMAL] * (num_vocab - len(_SPECIAL))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        # llama.cpp insists on the key, and an array cannot be empty: a pair that is no token.
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs] or ["< |"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def _byte_letters() -> list[str]:
    """GPT-2's visible letter for every byte: itself if printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]
