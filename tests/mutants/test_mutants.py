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
CEILING = "tests/unit/test_ceiling.py::"
PREFIXES = "tests/unit/test_prefix_cache.py::"
PLANNER = "tests/unit/test_planner.py::"
ADMISSION = "tests/unit/test_admission.py::"
ENGINE = "tests/unit/test_engine.py::"
RESUMPTION = "tests/unit/test_resumption.py::"


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
        "operations=tuple(self.operations),",
        "operations=tuple(self.operations[1:]),",
        SCHEDULER + "test_only_what_has_room_in_every_component_is_admitted",
    ),
    "ignore one component": Fault(
        "skippy_mesh/scheduler/memory.py",
        "if not pool.has_room(num_cells, donor, num_shared):",
        'if name != "window" and not pool.has_room(num_cells, donor, num_shared):',
        SCHEDULER + "test_only_what_has_room_in_every_component_is_admitted",
    ),
    "sample on replay": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "samples = end == sequence.num_known",
        "samples = end >= sequence.num_prompt",
        SCHEDULER + "test_a_victim_keeps_its_tokens_and_is_computed_again_without_sampling",
    ),
    "admit after a preemption": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "if not plan.num_preempted and self._admit(plan):",
        "if self._admit(plan):",
        SCHEDULER + "test_a_step_that_preempts_admits_nobody",
    ),
    "restore P instead of P - 1": Fault(
        "skippy_mesh/scheduler/prefix_cache.py",
        "            return sequence.num_known - 1\n",
        "            return sequence.num_known\n",
        PREFIXES + "test_the_last_token_is_always_computed",
    ),
    "share what is still on its way": Fault(
        "skippy_mesh/scheduler/prefix_cache.py",
        "donor = Donor(sequence.lane, sequence.request.namespace, tokens, match.num_shared)",
        "donor = Donor(sequence.lane, sequence.request.namespace, tokens, len(tokens))",
        PREFIXES + "test_only_what_every_stage_has_answered_is_shared",
    ),
    "lend a snapshot beside its boundary": Fault(
        "skippy_mesh/scheduler/prefix_cache.py",
        "return num_ready if num_ready == len(donor.tokens) <= num_common else 0",
        "return min(num_ready, num_common)",
        PREFIXES + "test_a_snapshot_is_lent_at_its_boundary_and_nowhere_else",
    ),
    "preempt before the cache gives way": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "self._prefixes.make_room(plan, len(decodes))",
        "pass",
        PREFIXES + "test_growth_beyond_a_promise_takes_from_the_cache_first",
    ),
    "one cache for all keys": Fault(
        "skippy_mesh/scheduler/prefix_cache.py",
        "tree = self._trees.get(namespace)\n",
        "tree = next(iter(self._trees.values()), None)\n",
        PREFIXES + "test_namespaces_never_share",
    ),
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
    "begin again without a past": Fault(
        "skippy_mesh/scheduler/plan.py",
        "histories={lane: past for lane, past in pasts.items() if past is not None},",
        "histories={lane: past for lane, past in pasts.items() if past and not past.outputs},",
        SCHEDULER + "test_who_begins_again_is_told_its_past",
    ),
    "pack cells to the last byte": Fault(
        "skippy_mesh/config.py",
        "return -(-kv_bytes * 100 // _KV_PERCENT)",
        "return kv_bytes",
        PLANNER + "test_cells_are_priced_as_if_they_filled_85_percent",
    ),
    "charge states per lane instead of per id": Fault(
        "coordinator/request.py",
        "return lanes * self.ids_per_lane + self.reserved_ids + self._num_snapshots(lanes)",
        "return lanes",
        PLANNER + "test_lanes_give_way_before_the_context_does",
    ),
    "give each stage of a machine all of its memory": Fault(
        "coordinator/planner.py",
        "return runs if need <= self.nodes[0].usable_bytes else None",
        "return runs",
        PLANNER + "test_one_machine_holds_as_many_stages_as_are_asked_for_out_of_one_memory",
    ),
    "count on what was planned": Fault(
        "coordinator/ceiling.py",
        "if sizes[component] < size:",
        "if False:",
        CEILING + "test_a_stage_that_measures_less_lowers_the_ceiling_and_is_named",
    ),
    "ask the first stage only": Fault(
        "skippy_mesh/scheduler/memory.py",
        "attention=_least(stage.attention for stage in stages),",
        "attention=stages[0].attention,",
        CEILING + "test_whatever_a_stage_lacks_no_stage_ever_refuses_a_step",
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
        "for place in self._open.values()\n        ]",
        "for place in ()\n        ]",
        ADMISSION + "test_a_restarted_coordinator_is_told_who_is_in_and_keeps_its_bounds",
    ),
    "believe an answer of an old term": Fault(
        "skippy_mesh/gateway/places.py",
        "if answer.term == term == self._term:",
        "if True:",
        ADMISSION + "test_a_coordinator_restarted_between_two_questions_costs_nobody_an_answer",
    ),
    "resubmit without history": Fault(
        "skippy_mesh/client.py",
        "outputs=tuple(self._outputs)",
        "outputs=()",
        RESUMPTION + "test_whenever_the_engine_dies_the_joined_tokens_are_those_of_one_that_lived",
    ),
    "begin in an epoch that the stages have seen": Fault(
        "skippy_mesh/scheduler/scheduler.py",
        "self.epoch = first_epoch - 1",
        "self.epoch = -1",
        RESUMPTION + "test_what_ran_is_submitted_with_its_history_and_what_waited_as_it_came",
    ),
    "go on before the lost stage is loaded": Fault(
        "skippy_mesh/engine.py",
        "self._is_restoring = not self._pipeline.restore(_RESTORE_S)",
        "self._is_restoring = False",
        ENGINE + "test_who_ran_when_a_stage_was_lost_waits_and_goes_on_as_if_nothing_had_been",
    ),
    "let who killed the engine run in company": Fault(
        "skippy_mesh/scheduler/sequence.py",
        "sequence.trial_end = sequence.num_known",
        "sequence.trial_end = 0",
        RESUMPTION + "test_a_request_that_kills_the_engine_ends_alone_and_the_others_go_on",
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
