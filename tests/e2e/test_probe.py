"""Whether llama.cpp runs on this CPU is asked of a child, once, and the answer may be its death.

The children here are shell scripts that die as a CPU without an instruction makes them die.
"""

from __future__ import annotations

import logging

import pytest

from skippy_mesh.errors import RuntimeUnavailableError
from stages.probe import can_repack

SCRIPT = """\
echo "$3" >> "$1"
case " $2 " in
  *" $3 "*) kill -ILL $$ ;;
  *" $3:exit "*) printf 'first line\\nlast line\\n' >&2; exit 3 ;;
esac
"""


@pytest.fixture
def probe(tmp_path):
    """A probe whose child dies in the given modes, and the list of modes it was run in."""
    script, calls = tmp_path / "child.sh", tmp_path / "calls"
    script.write_text(SCRIPT)
    calls.touch()

    class Probe:
        def __call__(self, dies_in=""):
            return can_repack(("/bin/sh", str(script), str(calls), dies_in))

        @property
        def calls(self):
            return calls.read_text().split()

    return Probe()


def test_a_healthy_machine_repacks_and_is_asked_once(probe, caplog):
    assert probe() is True
    assert probe() is True
    assert probe.calls == ["repack"]
    assert caplog.records == []


def test_a_cpu_that_cannot_repack_goes_on_without_and_says_so_once(probe, caplog):
    assert probe("repack") is False
    assert probe("repack") is False
    assert probe.calls == ["repack", "plain"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "SIGILL" in record.getMessage() and "\n" not in record.getMessage()


def test_a_cpu_that_can_do_neither_is_one_clear_error(probe):
    with pytest.raises(RuntimeUnavailableError) as caught:
        probe("repack plain")
    assert probe.calls == ["repack", "plain"]
    message = str(caught.value)
    assert message.count("SIGILL") == 2 and "make setup" in message and "\n" not in message


def test_a_failure_is_not_remembered_because_a_rebuild_mends_it(probe):
    for _ in range(2):
        with pytest.raises(RuntimeUnavailableError):
            probe("repack plain")
    assert probe.calls == ["repack", "plain"] * 2


def test_a_child_that_complains_is_quoted_by_its_last_line(probe, caplog):
    assert probe("repack:exit") is False
    assert "last line" in caplog.text and "first line" not in caplog.text


@pytest.mark.parametrize("memo", ["", "{", "[]", "null", "{}", '{"can_repack": '])
def test_a_broken_memory_of_the_verdict_is_replaced(probe, own_cache, memo):
    probe()
    (file,) = (own_cache / "probe").glob("*.json")
    file.write_text(memo)
    assert probe() is True
    assert probe() is True
    assert probe.calls == ["repack", "repack"]


def test_the_real_child_runs_here(monkeypatch):
    """Also where freed memory is filled with bytes that make no finite number: what it looks at
    must still be there."""
    monkeypatch.setenv("MALLOC_PERTURB_", "255")
    assert can_repack()
