"""Long: hostile model files by the thousand. Run by ``make test-long``."""

from __future__ import annotations

import random

import pytest

from skippy_mesh.errors import SkippyError
from stages.gguf_file import ModelFile
from stages.slices import cached_slice
from tests.models import make_llama

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_refused_or_cut_and_never_anything_else(tmp_path, seed):
    """Bytes flipped, cut off and moved in the header: a typed error or a slice, no other end."""
    whole = make_llama(tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"blk.5.") + 4096
    rng = random.Random(seed)
    path = tmp_path / "damaged.gguf"
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            at = rng.randrange(header)
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at : at + 8] = rng.randbytes(8)
            elif kind == 2:
                data[at : at + 8] = b"\xff" * 8
            else:
                other = rng.randrange(header)
                data[at : at + 32] = data[other : other + 32]
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            cached_slice(ModelFile.open(path), 0, 3).unlink()
        except SkippyError:
            continue
