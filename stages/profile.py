"""Which kernels a model may use, so that a row's bits never depend on the rows beside it.

llama.cpp picks a matrix kernel by how many rows a step has, and kernels round differently. A
profile switches off, or avoids by padding, every choice that would change within one model. What
switches, in llama.cpp's ggml/src/ggml-cpu (as in llama-cpp-python 0.3.36) on x86:

* llamafile/sgemm.cpp takes over from 2 rows on. Its sums equal the one-row dot product's for
  Q8_0, Q4_0 and Q5_0; not for float weights and IQ4_NL.
* repack.cpp rearranges weights at load; its gemm takes rows by fours, its gemv the rest. They
  agree for Q4_0, IQ4_NL and MXFP4; not for Q4_K (from AVX2 on) and Q2_K (AVX-512 only).
* tiled/tiled.cpp takes over from 8 rows on, and for an expert from 8 rows routed to it, which no
  padding can arrange. The environment variable GGML_CPU_TILED_MM=0 switches it off.

A profile is what measurements lead to expect, for AVX2 and AVX-512 alike; whether it holds on this
machine is for a self-test to say. It covers matrices only: attention (ops.cpp, with a q8_0 or bf16
cache) sums the cells of a lane in the order of the pool, whatever the step's other rows are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skippy_mesh.errors import InvalidBatchError
from skippy_mesh.families import Family
from stages.gguf_format import Tensor

_ALIKE = frozenset(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0", "Q1_0"))
_TILED = frozenset(
    (
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    )
)
_BY_FOURS = frozenset(("Q2_K", "Q4_K"))
# IQ4_NL only where it is not repacked, as a matrix whose height is no multiple of 8.
_FROM_TWO_ROWS = frozenset(("F32", "F16", "BF16", "IQ4_NL"))

_NOT_MULTIPLIED = ("ssm_conv1d.weight", "ssm_a", "ssm_d", "rope_freqs.weight")


@dataclass(frozen=True, slots=True)
class Profile:
    """``pad``: rows and outputs of a step are multiples of it. ``tiled``: GGML_CPU_TILED_MM may
    stay unset. ``repack``: llama_model_params.use_extra_bufts."""

    pad: int
    tiled: bool
    repack: bool


PLAIN = Profile(pad=1, tiled=True, repack=True)
"""llama.cpp left alone: the fastest, exact for some files only."""


def choose_profile(tensor_types: frozenset[str], *, can_repack: bool = True) -> Profile:
    """The fastest profile expected to be exact for a model with matrices of these types.

    ``tensor_types`` are those of :func:`matrix_types` over the whole model: from a slice's, stages
    would differ, and the answer with where the model was cut.
    """
    if tensor_types - _ALIKE - _TILED - _FROM_TWO_ROWS:
        return Profile(pad=4, tiled=False, repack=False)  # never measured: nothing that can be off
    pad = 2 if tensor_types & _FROM_TWO_ROWS else 1
    if can_repack and tensor_types & _BY_FOURS:
        pad = 4
    return Profile(pad=pad, tiled=not tensor_types & _TILED, repack=can_repack)


def matrix_types(tensors: Iterable[Tensor]) -> frozenset[str]:
    """GGUF type names of the weights that rows are multiplied with.

    Every file holds F32 norms, and hybrids F32 convolutions: they meet no matrix kernel. Neither
    does a weight with one row of outputs, which sgemm leaves to the dot product.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    if "output.weight" in by_name:  # else the token embedding is the output head, too
        by_name.pop("token_embd.weight", None)
    return frozenset(
        tensor.type.name
        for name, tensor in by_name.items()
        if any(size > 1 for size in tensor.shape[1:]) and not name.endswith(_NOT_MULTIPLIED)
    )


_DIFFER_ALONE = _FROM_TWO_ROWS | _BY_FOURS


def replays_in_chunks(family: Family, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a token's row has the same bits in a chunk as when it was decoded.

    Linear attention multiplies its output (``ssm_out``) sequence by sequence: in a decode step each
    is one row, whatever the padding, and no padding makes that kernel a chunk's.
    """
    if family.name != "linear":
        return True
    return not any(
        tensor.type.name in _DIFFER_ALONE
        for name, tensor in tensors.items()
        if name.endswith("ssm_out.weight")
    )


@dataclass(frozen=True, slots=True)
class Padding:
    """What a step needs besides its own rows.

    A row at position 0 on each of ``lanes`` follows the step's own; the lanes are freed after the
    step. ``outputs`` are indexes of rows, own or added, that are flagged only to fill up: their
    logits are for nobody.
    """

    lanes: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


def pad_plan(
    lanes: Sequence[int], samples: Sequence[bool], *, pad: int, scratch_lanes: Sequence[int]
) -> Padding:
    """The least that makes rows, and outputs if there are any, multiples of ``pad``.

    Outputs count because llama.cpp drops the other rows before the last layer's feed-forward. A
    flag costs that and a row of the head, a row all layers, so rows are only added for the sake of
    rows: there are always enough of them to flag. A step without outputs needs none.

    A recurrent model must never get a row beside a chunk: see :func:`chunk_lengths`.
    """
    num_rows, num_added = len(lanes), -len(lanes) % pad
    if not num_rows == len(samples) > 0:
        raise InvalidBatchError(f"a step has {num_rows} lanes and {len(samples)} output flags")
    added = tuple(scratch_lanes[:num_added])
    if len(set(added)) != num_added or not set(added).isdisjoint(lanes):
        raise InvalidBatchError(
            f"{num_added} rows to add on scratch lanes {list(scratch_lanes)}, which must be "
            f"different lanes and none of the step's own"
        )
    unflagged = [row for row, is_output in enumerate(samples) if not is_output]
    unflagged += range(num_rows, num_rows + num_added)
    num_missing = -sum(samples) % pad
    return Padding(added, tuple(unflagged[len(unflagged) - num_missing :]))
