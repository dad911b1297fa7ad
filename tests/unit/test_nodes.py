"""Facts about machines: what Ray says of them, and bytes as people write them. A plan for memory
that is not there fails on the first token."""

from __future__ import annotations

import pytest

from coordinator.nodes import RATE_LABEL, Node, nodes_of_cluster, usable_of
from skippy_mesh.errors import UsageError
from skippy_mesh.sizes import format_size, parse_size


def ray_node(name: str, **resources: float) -> dict[str, object]:
    """A row of ``ray.nodes()``, as far as it is read."""
    return {
        "NodeID": f"id-of-{name}".ljust(56, "0"),
        "NodeName": name,
        "NodeManagerHostname": "host",
        "Alive": True,
        "Resources": {"CPU": 4.0, "memory": 2.0**34, "object_store_memory": 1e9} | resources,
        "Labels": {"ray.io/node-id": "1"},
    }


def test_a_node_of_a_cluster_may_give_the_memory_it_declares():
    fast = ray_node("10.0.0.2", memory=2.0**35, GPU=1.0)
    fast["Labels"] = {RATE_LABEL: "50GB"}
    slow = ray_node("10.0.0.1", CPU=2.5)
    assert nodes_of_cluster([slow, fast]) == [
        Node("10.0.0.1", 2**34, num_cpus=2, node_id=slow["NodeID"]),
        Node("10.0.0.2", 2**35, 50 * 10**9, num_cpus=4, node_id=fast["NodeID"], num_gpus=1),
    ]


def test_dead_nodes_and_heads_without_cpus_hold_no_stage():
    dead = ray_node("10.0.0.2") | {"Alive": False, "Resources": {}}
    head = ray_node("10.0.0.3")
    head["Resources"] = {"memory": 2.0**34}
    assert nodes_of_cluster([dead, head]) == []


def test_nodes_of_one_machine_keep_apart():
    first, second = ray_node("10.0.0.1"), ray_node("10.0.0.1") | {"NodeID": "0" * 56}
    names = [node.name for node in nodes_of_cluster([first, second])]
    assert names == ["10.0.0.1-id-of-10", "10.0.0.1-00000000"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1073741824", 2**30),
        ("16GiB", 2**34),
        ("16G", 2**34),
        ("16Gi", 2**34),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("115.4GB", 115_400_000_000),
        ("900mib", 900 * 2**20),
        ("2TB", 2 * 10**12),
        ("0", 0),
    ],
)
def test_sizes_are_read_to_the_byte(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "16 gigs", "1e9", "1.GiB", "0x10"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.00KiB"),
        (3 * 2**29, "1.50GiB"),
        (2**50, "1024.00TiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit(num_bytes, expected):
    assert format_size(num_bytes) == expected


def test_a_size_that_is_asked_for_is_never_shown_as_less():
    for num_bytes in (1025, 2**30 + 1, 5 * 2**30 - 1, 10**12 + 7):
        assert parse_size(format_size(num_bytes, round_up=True)) >= num_bytes


def test_what_a_node_may_give_is_under_its_cap_and_leaves_headroom():
    assert usable_of(32, cap_bytes=24, headroom_bytes=8) == 16
    assert usable_of(32, headroom_bytes=8) == 24
    assert usable_of(4, headroom_bytes=8) == 0
    with pytest.raises(UsageError, match="needs a name"):
        Node("", 1)
