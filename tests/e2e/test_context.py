"""The owner of a native context: what it refuses, what it frees, and that nothing ends the process.

Every refusal is followed by a good step whose bits are those of a context that saw no bad one.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from skippy_mesh.config import LOAD_MODES, NUM_SPARE_LANES, ContextConfig
from skippy_mesh.errors import (
    InvalidBatchError,
    ModelFileError,
    NoRoomError,
    RuntimeUnavailableError,
    UsageError,
)
from skippy_mesh.messages import MAX_LANES, Copy, Remove
from skippy_mesh.sizes import process_bytes
from stages.batch import Rows
from stages.context import StageContext
from stages.profile import PLAIN
from stages.weights import Weights
from tests.models import make_llama
from tests.reference import assert_same_bits

WIDTH, VOCAB, MAX_ROWS = 192, 320, 32
ROOT = Path(__file__).parents[2]
CONFIG = ContextConfig(num_cells=512, num_lanes=4, max_rows=MAX_ROWS, num_threads=1)
HIDDEN = np.random.default_rng(3).standard_normal((6, 1200, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # q8_0 needs no padding to be exact.
    return make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="q8_0")


@pytest.fixture
def opened(model):
    contexts = []

    def opened(config=CONFIG, *, is_last=True, **options):
        contexts.append(StageContext(model, config, is_last=is_last, **options))
        return contexts[-1]

    yield opened
    for context in contexts:
        context.close()


def rows(lane, first, end, story=None):
    """Positions [first, end) of ``lane``; all but the last are no outputs."""
    inputs = HIDDEN[lane if story is None else story, first:end]
    count = end - first
    return Rows([lane] * count, range(first, end), [False] * (count - 1) + [True], inputs)


def joined(*parts):
    return Rows(
        [lane for part in parts for lane in part.lanes],
        [position for part in parts for position in part.positions],
        [flag for part in parts for flag in part.outputs],
        np.concatenate([part.inputs for part in parts]),
    )


def fill(context, lane, end, first=0, story=None):
    """Compute positions [first, end) in full steps; the last step's result."""
    result = None
    for start in range(first, end, MAX_ROWS):
        step = rows(lane, start, min(end, start + MAX_ROWS), story)
        result = context.decode(step).copy()
    return result


def positions_of(context):
    return [context.positions(lane) for lane in range(context.num_lanes)]


def started(context):
    """Lane 0 holds ten positions, lane 1 three."""
    context.decode(joined(rows(0, 0, 10), rows(1, 0, 3)))
    return context


def next_step(context):
    return context.decode(joined(rows(1, 3, 5), rows(0, 10, 11), rows(2, 0, 4))).copy()


def spoilt(value):
    inputs = HIDDEN[0, 10:12].copy()
    inputs[1, 100] = value
    return Rows([0, 0], [10, 11], [False, True], inputs)


def of(lanes, positions, *, flags=None, shape=None):
    flags = [True] * len(lanes) if flags is None else flags
    return Rows(lanes, positions, flags, np.ones(shape or (len(lanes), WIDTH), np.float32))


REFUSED = {
    "no rows": of([], []),
    "a row too many": of([0] * (MAX_ROWS + 1), range(10, 11 + MAX_ROWS)),
    "far too many rows": of([0] * 5000, range(10, 5010)),
    "a lane beyond the last": of([4], [0]),
    "the lane that keeps freed cells": of([0, 4], [10, 0]),
    "a lane beyond the library's": of([300], [0]),
    "a negative lane": of([-1], [0]),
    "a gap": of([0], [11]),
    "a gap inside the step": of([0, 0], [10, 12]),
    "a huge position": of([0], [2**31 - 1]),
    "a position no int holds": of([0], [2**40]),
    "a negative position": of([2], [-1]),
    "a repeat": of([0], [9]),
    "a repeat inside the step": of([0, 0], [10, 10]),
    "a reversal": of([0, 0], [11, 10]),
    "another lane's position": of([1, 0], [10, 3]),
    "a start in the middle": of([3], [1]),
    "NaN": spoilt(np.nan),
    "infinity": spoilt(np.inf),
    "rows too narrow": of([0], [10], shape=(1, WIDTH - 1)),
    "rows too wide": of([0], [10], shape=(1, 2 * WIDTH)),
    "fewer inputs than rows": of([0, 0], [10, 11], shape=(1, WIDTH)),
    "inputs without rows": of([0], [10], shape=(WIDTH,)),
    "a flag too few": of([0, 0], [10, 11], flags=[True]),
    "a position too few": of([0, 0], [10], flags=[True, True]),
}

REFUSED_OPERATIONS = {
    "remove of no lane": Remove(4),
    "remove of a negative lane": Remove(-1),
    "remove from the middle": Remove(0, 2, 5),
    "remove of a head": Remove(0, 0, 5),
    "remove past the end": Remove(0, 11),
    "copy to itself": Copy(0, 0, 0, 5),
    "copy of nothing": Copy(0, 2, 0, 0),
    "copy backwards": Copy(0, 2, 5, 3),
    "copy past the end": Copy(0, 2, 0, 11),
    "copy of a negative range": Copy(0, 2, -1, 5),
    "copy with a hole": Copy(0, 2, 5, 10),
    "copy over a live lane": Copy(0, 1, 0, 10),
    "copy from no lane": Copy(4, 2, 0, 5),
    "copy to no lane": Copy(0, 4, 0, 5),
    "copy of an empty lane": Copy(3, 2, 0, 1),
}


def refuse_everything(path):
    """Run in a child: a native abort must be a failed test, not the end of all tests."""
    for is_last in (True, False):
        context = started(StageContext(Path(path), CONFIG, is_last=is_last))
        for name, bad in {**REFUSED, **REFUSED_OPERATIONS}.items():
            try:
                context.decode(bad) if isinstance(bad, Rows) else context.apply(bad)
            except InvalidBatchError:
                continue
            raise AssertionError(f"{name} was accepted")
        next_step(context)
        context.close()
    print("alive")


def in_child(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr.decode()[-2000:])
    return done.stdout.decode().split("\n")[:-1]


def test_no_bad_batch_ends_the_process(model):
    code = "import sys; from tests.e2e.test_context import *; refuse_everything(sys.argv[1])"
    assert in_child(code, model) == ["alive"]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_step_changes_nothing(opened, case):
    context = started(opened())
    before = positions_of(context)
    with pytest.raises(InvalidBatchError) as caught:
        context.decode(REFUSED[case])
    assert "\n" not in str(caught.value)
    assert positions_of(context) == before
    assert_same_bits(next_step(context), next_step(started(opened())))


@pytest.mark.parametrize("case", REFUSED_OPERATIONS)
def test_a_refused_operation_changes_nothing(opened, case):
    context = started(opened())
    before = positions_of(context)
    with pytest.raises(InvalidBatchError):
        context.apply(REFUSED_OPERATIONS[case])
    assert positions_of(context) == before
    assert_same_bits(next_step(context), next_step(started(opened())))


@pytest.mark.parametrize("is_last", [True, False], ids=["last", "tapped"])
def test_steps_up_to_the_limit_are_taken(opened, is_last):
    context = opened(is_last=is_last)
    expected = (VOCAB,) if is_last else (WIDTH,)
    for lane, count in enumerate((MAX_ROWS - 1, MAX_ROWS)):
        found = context.decode(rows(lane, 0, count))
        assert found.shape == ((1,) if is_last else (count,)) + expected
    with pytest.raises(InvalidBatchError, match=f"1 to {MAX_ROWS} rows, got {MAX_ROWS + 1}"):
        context.decode(rows(2, 0, MAX_ROWS + 1))


def test_any_layout_of_the_same_inputs_gives_the_same_bits(opened):
    context = opened()
    whole = rows(0, 0, 8)
    expected = context.decode(whole).copy()
    frozen = whole.inputs.copy()  # what arrives over Ray
    frozen.setflags(write=False)
    sparse = np.zeros((16, 2 * WIDTH), np.float32)
    sparse[::2, ::2] = whole.inputs
    for inputs in (frozen, np.asfortranarray(whole.inputs), sparse[::2, ::2]):
        context.apply(Remove(0))
        step = Rows(whole.lanes, whole.positions, whole.outputs, inputs)
        assert_same_bits(context.decode(step), expected)


def test_a_full_pool_says_so_changes_nothing_and_recovers(opened):
    small = ContextConfig(num_cells=256, num_lanes=4, max_rows=MAX_ROWS, num_threads=1)
    context, other = opened(small), opened(small)
    assert context.num_cells == 256
    fill(context, 0, 150)
    fill(context, 1, 106)
    fill(other, 0, 150)
    before = positions_of(context)
    for step in (rows(0, 150, 151), rows(2, 0, 1), rows(0, 150, 150 + MAX_ROWS)):
        with pytest.raises(NoRoomError):
            context.decode(step)
        assert positions_of(context) == before
    context.apply(Remove(1, 100))
    expected = other.decode(rows(0, 150, 156)).copy()
    with pytest.raises(NoRoomError):
        context.decode(rows(0, 150, 157))
    assert_same_bits(context.decode(rows(0, 150, 156)), expected)
    with pytest.raises(NoRoomError):
        context.decode(rows(0, 156, 157))
    context.apply(Remove(1))
    assert_same_bits(fill(context, 0, 240, 156), fill(other, 0, 240, 156))
    assert context.positions(1) == (-1, -1)


def test_lanes_that_come_and_go_leave_the_bits_of_those_that_stay(opened):
    """Freed cells must not be reused out of order: attention sums a lane's cells as they lie."""
    context, alone = opened(), opened()
    for at in range(60):
        lane = 1 + at % 3
        context.apply(Remove(lane))
        step = joined(rows(0, at, at + 1), rows(lane, 0, 9 + at % 7))
        assert_same_bits(context.decode(step)[:1], alone.decode(rows(0, at, at + 1)))


def test_a_copied_prefix_goes_on_like_a_computed_one(opened):
    context, other = opened(), opened()
    fill(context, 0, 50)
    context.apply(Copy(0, 2, 0, 40))
    assert context.positions(2) == (0, 39)
    fill(other, 2, 40, story=0)
    for first, end in ((40, 45), (45, 46), (46, 70)):
        ours, theirs = rows(2, first, end), rows(2, first, end)
        assert_same_bits(context.decode(ours), other.decode(theirs))
    # The donor may leave: what is shared stays.
    context.apply(Remove(0))
    assert context.positions(0) == (-1, -1)
    assert_same_bits(context.decode(rows(2, 70, 72)), other.decode(rows(2, 70, 72)))


def test_a_copy_of_cells_that_are_not_there_is_refused_and_leaves_nothing(opened):
    """llama.cpp copies what it has without a word, and would decode behind it."""
    context, other = opened(), opened()
    fill(context, 0, 50)
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context._context), 0, 30, -1)
    with pytest.raises(InvalidBatchError, match=r"left lane 2 with positions \(0, 29\)"):
        context.apply(Copy(0, 2, 0, 40))
    assert context.positions(2) == (-1, -1)
    assert_same_bits(fill(context, 2, 20), fill(other, 2, 20))


def test_a_removed_tail_is_computed_again_to_the_same_bits(opened):
    context = opened()
    fill(context, 1, 40)
    expected = fill(context, 0, 60)
    context.apply(Remove(0, 35))
    assert context.positions(0) == (0, 34)
    fill(context, 0, 50, 35, story=4)
    context.apply(Remove(0, 32))
    assert_same_bits(fill(context, 0, 60, 32), expected)


def test_clear_frees_every_lane(opened):
    context = opened()
    expected = fill(context, 0, 40)
    fill(context, 1, 30)
    context.clear()
    assert positions_of(context) == [(-1, -1)] * 4
    assert_same_bits(fill(context, 0, 40), expected)


def test_another_thread_may_not_touch_a_context(opened):
    context = started(opened())
    caught = []

    def trespass():
        for act in (
            lambda: context.decode(rows(0, 10, 11)),
            lambda: context.apply(Remove(0)),
            lambda: context.positions(0),
            context.clear,
            context.close,
        ):
            try:
                act()
            except AssertionError as error:
                caught.append(str(error))

    thread = threading.Thread(target=trespass)
    thread.start()
    thread.join()
    assert len(caught) == 5 and "thread" in caught[0]
    assert_same_bits(next_step(context), next_step(started(opened())))


def test_a_closed_context_refuses_and_is_closed_once(model):
    context = StageContext(model, CONFIG, is_last=False)
    context.close()
    for act in (context.close, context.clear, lambda: context.decode(rows(0, 0, 1))):
        with pytest.raises(AssertionError):
            act()


@pytest.mark.parametrize("load_mode", LOAD_MODES)
def test_however_weights_are_read_they_are_the_same(model, opened, load_mode):
    expected = opened().decode(rows(0, 0, 20))
    weights = Weights(model, PLAIN, load_mode)
    context = StageContext(weights, CONFIG, is_last=True)
    try:
        assert_same_bits(context.decode(rows(0, 0, 20)), expected)
    finally:
        context.close()
        weights.close()


def test_a_thousand_steps_survive_the_garbage_collector(opened):
    """What C reads must outlive the call that handed it over: the tap, its input, the callback."""
    roomy = ContextConfig(num_cells=2304, num_lanes=2, max_rows=MAX_ROWS, num_threads=1)
    context = opened(roomy, is_last=False)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        steps = [context.decode(rows(0, at, at + 1)) for at in range(1000)]
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    in_chunks = [
        context.decode(rows(1, at, min(1000, at + MAX_ROWS), story=0))
        for at in range(0, 1000, MAX_ROWS)
    ]
    assert_same_bits(np.concatenate(steps), np.concatenate(in_chunks))


def test_memory_is_what_the_file_and_the_pool_weigh(model):
    """Also where the heap still has an earlier pool, into which the next one just fits."""

    def taken(num_cells):
        roomy = ContextConfig(num_cells=num_cells, num_lanes=4, max_rows=MAX_ROWS, num_threads=1)
        context = StageContext(model, roomy, is_last=True)
        memory = context.memory()
        context.close()
        assert 0.9 * model.stat().st_size < memory.weight_bytes < model.stat().st_size
        return memory.context_bytes

    cell_bytes = 6 * 2 * 64 * 34 / 32  # layers x (K and V) x width x bytes of q8_0
    for _ in range(3):
        assert 1 < (taken(65536) - taken(16384)) / (49152 * cell_bytes) < 1.5


def test_closing_gives_the_memory_back(model):
    roomy = ContextConfig(num_cells=65536, num_lanes=4, max_rows=MAX_ROWS, num_threads=1)
    resident = []
    for _ in range(5):
        context = StageContext(model, roomy, is_last=False)
        fill(context, 0, 64)
        resident.append(process_bytes()[0])
        context.close()
    assert resident[-1] - resident[0] < 16 * 2**20  # one pool is 50 MiB


def test_a_pool_beyond_this_machine_is_one_clear_error(model):
    for cells in (2**31 - 1, 10**9):
        with pytest.raises(RuntimeUnavailableError, match=r"--ctx-size") as caught:
            StageContext(model, ContextConfig(num_cells=cells), is_last=True)
        assert str(cells) in str(caught.value) and "\n" not in str(caught.value)


LIMITED = """
import resource, sys
from pathlib import Path
from skippy_mesh.config import ContextConfig
from skippy_mesh.errors import RuntimeUnavailableError
from stages.context import StageContext
from stages.profile import PLAIN
path = Path(sys.argv[1])
small = ContextConfig(num_cells=256, num_threads=1)
StageContext(path, small, is_last=False).close()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
for is_last in (True, False):
    try:
        StageContext(path, ContextConfig(num_cells=10**6, num_threads=1), is_last=is_last)
    except RuntimeUnavailableError as error:
        print(error)
context = StageContext(path, small, is_last=False)
context.close()
"""


def test_a_pool_the_system_refuses_is_one_clear_error(model):
    lines = in_child(LIMITED, model)
    assert len(lines) == 2
    assert all("1000000 cells" in line and "--ctx-size" in line for line in lines)


def test_a_failed_context_keeps_nothing(tmp_path):
    big = make_llama(tmp_path / "big.gguf", num_layers=12, width=384)
    absurd = ContextConfig(num_cells=10**9)
    resident = []
    for _ in range(5):
        with pytest.raises(RuntimeUnavailableError):
            StageContext(big, absurd, is_last=False)
        resident.append(int(Path("/proc/self/statm").read_text().split()[0]) * 4096)
    assert resident[-1] - resident[0] < big.stat().st_size


@pytest.mark.parametrize("kind", ["text", "cut short", "missing", "folder"])
def test_a_file_that_is_no_model_is_one_clear_error(model, tmp_path, kind):
    path = tmp_path / "bad.gguf"
    if kind == "text":
        path.write_text("no model\n" * 1000)
    elif kind == "cut short":
        path.write_bytes(model.read_bytes()[:-100_000])
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ModelFileError, match=r"bad\.gguf") as caught:
        StageContext(path, CONFIG, is_last=True)
    assert "\n" not in str(caught.value)


MANY_LANES = """
import itertools, sys
from pathlib import Path
from skippy_mesh.config import ContextConfig
from stages.context import StageContext
from stages.profile import PLAIN
from stages.profile import Profile
for num_lanes, max_rows, pad in itertools.product((1, 8, int(sys.argv[2])), (1, 7, 256), (1, 2, 4)):
    config = ContextConfig(num_cells=256, num_lanes=num_lanes, max_rows=max_rows)
    profile = Profile(pad=pad, tiled=False, repack=True)
    context = StageContext(Path(sys.argv[1]), config, is_last=True, profile=profile)
    assert (context.num_lanes, context.max_rows) == (num_lanes, max_rows)
    context.close()
print("alive")
"""


def test_any_number_of_lanes_and_rows_makes_a_context(model):
    """In a child: the library asserts that a step could hold a row of every sequence."""
    assert in_child(MANY_LANES, model, MAX_LANES - NUM_SPARE_LANES) == ["alive"]


def test_lanes_that_the_library_cannot_number_are_refused():
    with pytest.raises(UsageError, match="from 1 to 252"):
        ContextConfig(num_lanes=MAX_LANES - NUM_SPARE_LANES + 1)


@pytest.mark.parametrize("pad", [1, 4])
def test_a_last_stage_can_show_the_states_before_its_head(opened, pad):
    """The self-test looks at both in one step; whose graph stops there is the other stages'."""
    profile = replace(PLAIN, pad=pad)
    plain, inner = opened(profile=profile), opened(is_last=False, profile=profile)
    shown = opened(profile=profile, keeps_hidden=True)
    for step in (
        joined(rows(0, 0, 5), rows(1, 0, 3), rows(2, 0, 1)),
        joined(rows(1, 3, 4), rows(0, 5, 6)),
    ):
        assert_same_bits(shown.decode(step), plain.decode(step))
        flagged = np.flatnonzero(step.outputs)
        assert_same_bits(shown.hidden, inner.decode(step)[flagged])
