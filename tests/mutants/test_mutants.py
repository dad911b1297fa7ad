"""Planted faults. Each must turn the unchanged suite red, or the suite would not notice it.

A fault is a piece of a product file and what stands there instead. It is applied to a copy of the
tree, and the tests that should see it run there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("skippy_mesh", "stages", "coordinator", "bench", "tests", "pyproject.toml")
SCHEDULER = "tests/unit/test_scheduler.py::"
LEDGER = "tests/unit/test_ledger.py::"
CONTEXT = "tests/e2e/test_context.py::"
PLANNER = "tests/unit/test_planner.py::"
ADMISSION = "tests/unit/test_admission.py::"


@dataclass(frozen=True, slots=True)
class Fault:
    path: str
    old: str
    new: str
    tests: str

    def apply(self, tree: Path) -> None:
        file = tree / self.path
        text = file.read_text()
        assert text.count(self.old) == 1, f"{self.path} does not hold this once:\n{self.old}"
        file.write_text(text.replace(self.old, self.new))


FAULTS = {
    "drop a row-map entry": Fault(
        "skippy_mesh/scheduler/plan.py",
        "for part in sorted(self.parts, key=lambda part: part.lane):",
        "for part in sorted(self.parts, key=lambda part: part.lane)[: len(self.parts) // 2 + 1]:",
        SCHEDULER + "test_a_long_and_many_short_requests_run_together",
    ),
    "skip one seq_rm": Fault(
        "skippy_mesh/scheduler/plan.py",
        "operations=tuple(Remove(lane) for lane in self.removed),",
        "operations=tuple(Remove(lane) for lane in self.removed[1:]),",
        SCHEDULER + "test_only_what_has_room_in_every_component_is_admitted",
    ),
    "ignore one component": Fault(
        "skippy_mesh/scheduler/memory.py",
        "if num_cells > pool.num_free - pool.num_promised:",
        'if name != "window" and num_cells > pool.num_free - pool.num_promised:',
        SCHEDULER + "test_only_what_has_room_in_every_component_is_admitted",
    ),
    "sample on replay": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "samples=end == sequence.num_known,",
        "samples=end >= sequence.num_prompt,",
        SCHEDULER + "test_a_victim_keeps_its_tokens_and_is_computed_again_without_sampling",
    ),
    "admit after a preemption": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "if not plan.num_preempted and self._admit(plan):",
        "if self._admit(plan):",
        SCHEDULER + "test_a_step_that_preempts_admits_nobody",
    ),
    # "restore P instead of P - 1" comes with the prefix cache: nothing is restored yet.
    "skip the post-copy position check": Fault(
        "stages/memory.py",
        "if self.positions(dst) != expected:",
        "if False:",
        CONTEXT + "test_a_copy_of_cells_that_are_not_there_is_refused_and_leaves_nothing",
    ),
    "reuse an id early": Fault(
        "skippy_mesh/scheduler/memory.py",
        """        self._retired.add(lane)

    def confirm(self, lane: int) -> None:
        self._retired.remove(lane)
        heapq.heappush(self._free, lane)
""",
        """        heapq.heappush(self._free, lane)

    def confirm(self, lane: int) -> None:
        pass
""",
        LEDGER + "test_an_id_is_free_only_when_its_return_is_confirmed",
    ),
    "cap all rows instead of decode rows": Fault(
        "skippy_mesh/scheduler/composer.py",
        "budget = self._rules.max_rows - len(decodes)\n",
        "budget = -(-len(list(running)) // self._max_in_flight) - len(decodes)\n",
        SCHEDULER + "test_the_share_of_a_batch_caps_decodes_and_not_prompts",
    ),
    "lose one stage's acknowledgement": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "for lane in plan.removed:",
        "for lane in plan.removed[1:]:",
        SCHEDULER + "test_an_id_comes_back_only_when_all_stages_have_confirmed",
    ),
    "pack cells to the last byte": Fault(
        "coordinator/costs.py",
        "return -(-self.pool * bytes_per_cell * 100 // _KV_PERCENT)",
        "return self.pool * bytes_per_cell",
        PLANNER + "test_cells_are_priced_as_if_they_filled_85_percent",
    ),
    "charge states per lane instead of per id": Fault(
        "coordinator/request.py",
        "return lanes * self.ids_per_lane + self.reserved_ids",
        "return lanes",
        PLANNER + "test_lanes_give_way_before_the_context_does",
    ),
    "cut anywhere": Fault(
        "coordinator/layout.py",
        "if costs.why_illegal(lo, hi) is None)",
        "if lo < hi)",
        PLANNER + "test_only_legal_cuts_are_made",
    ),
    "take nodes as they come": Fault(
        "coordinator/nodes.py",
        "sorted(nodes, key=lambda node: (-node.usable_bytes, node.name))",
        "list(nodes)",
        PLANNER + "test_the_order_of_nodes_does_not_matter",
    ),
    "let one more in than may wait": Fault(
        "coordinator/admission.py",
        "if num_open >= limits.max_open:",
        "if num_open > limits.max_open:",
        ADMISSION + "test_when_to_come_back_is_what_the_queue_takes_at_the_rate_seen",
    ),
    "hand in an empty book": Fault(
        "skippy_mesh/gateway/places.py",
        "for place in self._open.values()\n                ]",
        "for place in ()\n                ]",
        ADMISSION + "test_a_restarted_coordinator_is_told_who_is_in_and_keeps_its_bounds",
    ),
    "believe an answer of an old term": Fault(
        "skippy_mesh/gateway/places.py",
        "if answer.term == term == self._term:",
        "if True:",
        ADMISSION + "test_a_coordinator_restarted_between_two_questions_costs_nobody_an_answer",
    ),
}


@pytest.fixture
def tree(tmp_path):
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, tmp_path / "tree" / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / "tree" / name)
    return tmp_path / "tree"


def suite(tree, *tests):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_fault_the_copy_is_green(tree):
    done = suite(tree, *sorted({fault.tests for fault in FAULTS.values()}))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_the_suite_sees(name, tree):
    fault = FAULTS[name]
    fault.apply(tree)
    done = suite(tree, fault.tests)
    assert done.returncode == 1, f"{name}: {done.stdout[-2000:]}{done.stderr}"
    assert " failed" in done.stdout, "an error of the tree is not the test that sees the fault"
