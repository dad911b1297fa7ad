"""Frames survive the trip, and nothing but a valid frame gets in."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_mesh import wire
from skippy_mesh.errors import InvalidBatchError, RequestError
from skippy_mesh.messages import (
    Copy,
    History,
    Remove,
    SamplingParams,
    StageTime,
    StepBatch,
)

lanes = st.integers(0, 255)
int32 = st.integers(-(2**31), 2**31 - 1)
operations = st.one_of(
    st.builds(Copy, lanes, lanes, int32, int32), st.builds(Remove, lanes, int32, int32)
)
token_ids = st.integers(0, 2**31 - 1)
columns = st.lists(token_ids, max_size=4).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 1000),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.01, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    repeat_last_n=st.integers(-1, 1000),
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.lists(
        st.tuples(token_ids, st.floats(-100, 100) | st.just(-math.inf)), max_size=3
    ).map(tuple),
    allowed_ids=columns,
    suppressed_ids=columns,
    min_tokens=st.integers(0, 2**31),
    ending_ids=columns,
    grammar=st.text(max_size=9),
    num_logprobs=st.none() | st.integers(0, 20),
)
histories = st.builds(History, token_ids, columns, columns)
rows = st.lists(st.tuples(lanes, int32, int32, st.booleans()), max_size=40)


def batch_of(epoch, step_id, operations, rows, new_lanes, histories, forgotten):
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    return StepBatch(
        epoch=epoch,
        step_id=step_id,
        operations=tuple(operations),
        lanes=columns[0],
        positions=columns[1],
        tokens=columns[2],
        samples=columns[3],
        new_lanes=new_lanes,
        histories=histories,
        forgotten_lanes=tuple(forgotten),
    )


batches = st.builds(
    batch_of,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.lists(operations, max_size=5),
    rows,
    st.dictionaries(lanes, sampling, max_size=3),
    st.dictionaries(lanes, histories, max_size=3),
    st.lists(lanes, max_size=3),
)
EXAMPLE = batch_of(
    3, 7, [Copy(1, 2, 0, 5), Remove(4)], [(0, 5, 9, True), (1, 0, 4, False)],
    {0: SamplingParams(temperature=1.0, seed=-5, suppressed_ids=(1, 2))},
    {0: History(5, (4, 5), (9,))}, [9],
)  # fmt: skip


STAGES = (StageTime(0.25, 0.5, 1, 96), StageTime(1e-9, 0.0, 0))
ONES = wire.Hidden(np.ones((3, 4), np.float32), STAGES)


@given(batches)
def test_a_step_survives_the_wire(batch):
    assert wire.decode_step(wire.encode_step(batch)) == batch


def test_activations_survive_the_wire_bit_for_bit():
    rows = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    rows[0, :4] = [-0.0, 1e-45, 3.4e38, -1e-38]
    epoch, step_id, back = wire.decode_activations(
        wire.encode_activations(2, 9, wire.Hidden(rows, STAGES))
    )
    assert (epoch, step_id) == (2, 9)
    assert np.array_equal(back.rows.view(np.uint32), rows.view(np.uint32))
    assert back.stages == STAGES


def test_a_strided_view_is_sent_as_what_it_shows():
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)[::2, ::2]
    assert np.array_equal(
        wire.decode_activations(wire.encode_activations(0, 0, wire.Hidden(rows)))[2].rows, rows
    )


@pytest.mark.parametrize("kind", ["step", "activations"])
def test_every_truncation_is_refused(kind):
    frame, decode = (
        (wire.encode_step(EXAMPLE), wire.decode_step)
        if kind == "step"
        else (
            wire.encode_activations(0, 0, ONES),
            wire.decode_activations,
        )
    )
    for length in range(len(frame)):
        with pytest.raises(InvalidBatchError):
            decode(frame[:length])


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_never_raises_anything_else(at, flip):
    frame = bytearray(wire.encode_step(EXAMPLE))
    frame[at % len(frame)] ^= flip
    try:
        batch = wire.decode_step(bytes(frame))
    except InvalidBatchError:
        return
    assert {len(c) for c in (batch.lanes, batch.positions, batch.tokens)} == {len(batch.samples)}


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(InvalidBatchError):
        wire.decode_step(data)


def edited(frame: bytes, index: int, value: object) -> bytes:
    fields = msgpack.unpackb(frame, raw=False)
    fields[index] = value
    return msgpack.packb(fields, use_bin_type=True)


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (0, 3, "version 3, this stage speaks 4"),
        (1, wire.KIND_ACTIVATIONS, "kind"),
        (2, "0", "expected an integer"),
        (4, [["r", 0, 0, -1]] * (wire.MAX_OPERATIONS + 1), "operations"),
        (5, b"\0" * 4, "a column of 1 for 2 rows"),
        (5, b"\0" * 7, "malformed"),
        (8, b"\0\2", "sample flag"),
    ],
)
def test_a_bad_field_is_refused_by_name(index, value, reason):
    with pytest.raises(InvalidBatchError, match=reason):
        wire.decode_step(edited(wire.encode_step(EXAMPLE), index, value))


@pytest.mark.parametrize("shape", [(3, 5), (2**31, 0), (wire.MAX_ROWS + 1, 1), (-1, -12)])
def test_a_shape_that_does_not_match_its_payload_is_refused(shape):
    frame = wire.encode_activations(0, 0, ONES)
    with pytest.raises(InvalidBatchError):
        wire.decode_activations(edited(edited(frame, 5, shape[0]), 6, shape[1]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
        ("top_p", 0.0), ("top_p", 1.1), ("typical_p", 0.0), ("typical_p", 1.1),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")), ("repeat_last_n", -2), ("min_tokens", -1),
        ("logit_bias", ((1, float("nan")),)), ("logit_bias", ((1, float("inf")),)),
        ("min_p", -0.1), ("min_p", 1.5), ("top_k", -2),
        ("seed", 2**63), ("seed", -(2**63) - 1),
    ],
)  # fmt: skip
def test_sampling_parameters_out_of_range_name_the_field(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
