"""What the doctor says of what it is shown. Without these it calls a machine well that cannot
serve, or ill one that can."""

from __future__ import annotations

import signal
import socket
import sys

import pytest

from coordinator.hops import Hop, NodeFacts
from coordinator.nodes import Node
from skippy_mesh import checks
from skippy_mesh.errors import RuntimeUnavailableError
from stages.library import Library, cpu_features, features_in, library, versions

PINS = {"ray": "2.60.0", "llama-cpp-python": "0.3.36"}
GOOD = {"python": "3.11.1", "ray": "2.60.0", "llama-cpp-python": "0.3.36"}
CPU = frozenset(("avx", "avx2", "fma", "f16c", "bmi2"))
BUILT = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "REPACK")


def test_pins_are_those_of_the_package_itself():
    assert checks.pinned_versions()["ray"] == "2.60.0"
    assert versions()["ray"] is not None


@pytest.mark.parametrize(
    ("installed", "level", "needle"),
    [
        (GOOD, "ok", "ray 2.60.0"),
        ({**GOOD, "ray": "2.59.0"}, "warn", "measured with ray 2.60.0"),
        ({**GOOD, "ray": None}, "fix", "not installed: ray"),
    ],
)
def test_versions(installed, level, needle):
    found = checks.check_versions(installed, PINS)
    assert found.level == level and needle in found.text


@pytest.mark.parametrize(
    ("built", "has", "level", "needle"),
    [
        (BUILT, CPU, "ok", "the build fits"),
        ((*BUILT, "AVX512"), CPU, "fix", "built for AVX512, which this CPU has not"),
        (BUILT, CPU | {"avx512f"}, "warn", "without AVX512"),
        (BUILT, CPU | {"amx_int8"}, "ok", "fits"),
        ((*BUILT, "AMX_INT8"), CPU | {"amx_int8"}, "warn", "nobody has proved"),
        (BUILT, frozenset(), "ok", ""),
    ],
)
def test_a_build_is_for_this_cpu_or_not(built, has, level, needle):
    found = checks.check_cpu(built, has)
    assert found.level == level and needle in found.text


def test_features_are_read_from_both_sides():
    text = "CPU : SSE3 = 1 | AVX512 = 0 | SVE_CNT = 16 | REPACK = 1 | "
    assert features_in(text) == ("SSE3", "SVE_CNT", "REPACK")
    assert cpu_features("model name : x\nflags\t\t: fpu avx avx2\n") == {"avx", "avx2"}
    assert cpu_features("Features\t: fp asimd\n") == {"asimd"}
    assert cpu_features("") == frozenset()


def test_a_library_that_kills_its_process_kills_a_child_only():
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"
    with pytest.raises(RuntimeUnavailableError, match="SIGILL"):
        library((sys.executable, "-c", kill))


def test_a_tap_that_does_not_load_stops_serve():
    found = checks.check_library(Library("/lib", ("AVX",), "the compiled part is missing"))
    assert (found.level, found.text) == ("fix", "the compiled part is missing")


def test_without_repacking_it_is_slower_and_not_wrong():
    assert checks.check_kernels(can_repack=True).level == "ok"
    assert checks.check_kernels(can_repack=False).level == "warn"


KEPT = {"slices": 100, "selftest": 1}


def test_a_disk_must_hold_the_slices(tmp_path):
    assert checks.check_disk(tmp_path, needed_bytes=0, kept=KEPT).level in ("ok", "warn")
    lost = checks.check_disk(tmp_path, needed_bytes=1 << 60, kept=KEPT)
    assert lost.level == "fix" and "SKIPPY_CACHE_DIR" in lost.text
    # All of them may be there already.
    there = checks.check_disk(tmp_path, needed_bytes=1 << 60, kept={"slices": 1 << 60})
    assert there.level == "warn"


def test_a_folder_that_cannot_be_written_stops_serve(tmp_path):
    (tmp_path / "file").write_text("")
    found = checks.check_disk(tmp_path / "file" / "cache", needed_bytes=0, kept={})
    assert found.level == "fix" and "cannot be written" in found.text


def test_a_port_in_use_stops_serve():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = checks.check_port("127.0.0.1", port)
    assert found.level == "fix" and str(port) in found.text
    assert checks.check_port("127.0.0.1", 0).level == "ok"


def test_a_cluster_without_a_node_to_use_stops_serve():
    assert checks.check_nodes([], address="h:1", start_s=1).level == "fix"
    node = Node("a", 3 << 30, num_cpus=2)
    found = checks.check_nodes([node], address="h:1", start_s=1)
    assert found.level == "ok" and "h:1 answers: a (2 CPUs, 3.00GiB)" in found.text
    assert "starts in 1.0 s" in checks.check_nodes([node], address=None, start_s=1).text


@pytest.mark.parametrize(("ms", "level"), [(1.9, "ok"), (25.0, "warn")])
def test_a_slow_hop_is_said_and_a_large_frame_may_be_slow(ms, level):
    small = Hop(source="a", target="b", num_rows=1, frame_bytes=2400, ms=ms)
    large = Hop(source="a", target="b", num_rows=512, frame_bytes=1 << 20, ms=99.0)
    found = checks.check_hops([small, large])
    assert found.level == level
    assert f"a to b: {ms:.1f} ms for 1 row" in found.text and "512 rows" in found.text


@pytest.mark.parametrize(
    ("other", "level", "needle"),
    [
        (NodeFacts("b", {"ray": "1"}, ("avx",), True), "ok", "a, b: the same"),
        (NodeFacts("b", {"ray": "1"}, ("avx",), False), "fix", "no such model file on b"),
        (NodeFacts("b", {"ray": "2"}, ("avx",), True), "warn", "other versions"),
        (NodeFacts("b", {"ray": "1"}, ("sse",), True), "warn", "differ in CPU"),
    ],
)
def test_nodes_of_a_cluster_must_have_the_model_and_should_be_alike(other, level, needle):
    found = checks.check_alike([NodeFacts("a", {"ray": "1"}, ("avx",), True), other])
    assert found.level == level and needle in found.text
