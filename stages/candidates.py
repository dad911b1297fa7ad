"""Tokens with their logits, in the shape llama.cpp's samplers take."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import numpy.typing as npt

from stages.batch import Floats

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
Ids = npt.NDArray[np.int32]
_POINTER = ctypes.POINTER(llama_cpp.llama_token_data)


class Candidates:
    """An array of (id, logit, p) that native samplers change, sort and shorten in place."""

    def __init__(self, ids: Ids, logits: Floats):
        self.rows: np.ndarray[tuple[int], np.dtype[np.void]] = np.zeros(len(ids), _CANDIDATE)
        self.rows["id"] = ids
        self.rows["logit"] = logits

    def apply(self, sampler: int) -> None:
        array = llama_cpp.llama_token_data_array(
            self.rows.ctypes.data_as(_POINTER), len(self.rows), -1, False
        )
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        # What is left is a prefix of our own array.
        self.rows = self.rows[: array.size]
