"""``skippy-mesh doctor`` on a machine that can serve, and with flags that nothing can serve."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest

from tests.processes import SKIPPY, environment


@pytest.fixture
def doctor(tmp_path, ray_dir):
    env = environment(tmp_path / "cache", ray_dir)

    def run(*arguments):
        done = subprocess.run(
            [*SKIPPY, "doctor", *arguments], env=env, capture_output=True, timeout=280, check=False
        )
        assert done.stderr == b""
        return done.returncode, done.stdout.decode()

    return run


def test_a_machine_that_can_serve_is_well_and_its_hops_are_measured(doctor):
    code, out = doctor("--stages", "2", "--port", "0", "--json")
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert list(checks) == [
        "versions", "library", "cpu", "model", "kernels", "exact", "port", "memory", "disk", "ray",
        "hops",
    ]  # fmt: skip
    assert (code, found["ok"]) == (0, True), out
    assert checks["exact"]["exact"] is True
    assert (checks["memory"]["stages"], len(checks["memory"]["cuts"])) == (2, 1)
    assert checks["disk"]["needed_bytes"] > 50 << 20
    token, chunk = checks["hops"]["hops"]
    assert (token["num_rows"], chunk["num_rows"]) == (1, 512)
    width = 576
    assert 4 * width < token["frame_bytes"] < 4 * width + 200
    assert 512 * 4 * width < chunk["frame_bytes"] < 513 * 4 * width
    assert 0 < chunk["ms"] < 5000


def test_what_would_stop_serve_is_said_line_by_line_and_is_exit_1(doctor):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out = doctor("/no/such.gguf", "--port", port, "--address", "nonsense")
    assert code == 1
    lines = {line.split()[1]: line for line in out.splitlines()}
    for name, needle in (("model", "/no/such.gguf"), ("port", port), ("ray", "nonsense")):
        assert lines[name].startswith("fix") and needle in lines[name]
    assert lines["kernels"].split()[0] in ("ok", "warn")
    assert "hops" not in lines
