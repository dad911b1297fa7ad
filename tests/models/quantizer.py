"""llama.cpp's own quantiser, for the types that are not written directly."""

from __future__ import annotations

import os
from pathlib import Path

_ENUM_PREFIX = "LLAMA_FTYPE_MOSTLY_"


def quantize_file(source: Path, target: Path, dtype: str) -> None:
    """Write the f32 model ``source`` as ``dtype``, e.g. q4_K_M: a mix of types by tensor.

    llama.cpp gives tensors whose rows do not fit the type another one, without an error.
    """
    # Not at the top: most users of these models need neither llama.cpp nor the wait for it.
    import llama_cpp

    from stages.native import last_error, load_library

    load_library()  # which also keeps it quiet
    file_type = getattr(llama_cpp, _ENUM_PREFIX + dtype.upper(), None)
    if file_type is None:
        names = sorted(name for name in dir(llama_cpp) if name.startswith(_ENUM_PREFIX))
        known = ", ".join(name.removeprefix(_ENUM_PREFIX).lower() for name in names)
        raise ValueError(f"dtype {dtype!r} is none of f32, {known}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, file_type
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params):
        raise ValueError(f"llama.cpp cannot write {target} as {dtype}: {last_error()}")
