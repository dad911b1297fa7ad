"""The weights of a slice as llama.cpp has loaded them. They are only read, so any number of
contexts, each on a thread of its own, may share them."""

from __future__ import annotations

from pathlib import Path

import llama_cpp

from skippy_mesh.errors import ModelFileError
from stages.native import allow_tiled_kernels, last_error, load_library
from stages.profile import Profile

_LOAD_MODES = {
    "auto": llama_cpp.LLAMA_LOAD_MODE_AUTO,
    "none": llama_cpp.LLAMA_LOAD_MODE_NONE,
    "mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP,
    "mlock": llama_cpp.LLAMA_LOAD_MODE_MLOCK,
    "mmap+mlock": llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    "dio": llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO,
}


class Weights:
    """Of the slice at ``path``; ``profile`` is the whole mesh's. Closed after every context."""

    def __init__(self, path: Path, profile: Profile, load_mode: str = "auto"):
        load_library()
        allow_tiled_kernels(profile.tiled)
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = profile.repack
        params.load_mode = _LOAD_MODES[load_mode]
        model: int | None = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise ModelFileError(f"{path}: llama.cpp cannot load it: {last_error()}")
        self.model = model
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.num_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.num_embd: int = llama_cpp.llama_model_n_embd(model)
        self.num_layers: int = llama_cpp.llama_model_n_layer(model)
        self.num_bytes: int = llama_cpp.llama_model_size(model)
        self.window: int = llama_cpp.llama_model_n_swa(model)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.model)
