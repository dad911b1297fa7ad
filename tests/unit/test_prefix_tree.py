"""The index of prefixes. If it is wrong, a prompt starts from another's tokens, or from none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skippy_mesh.scheduler.prefix_tree import PrefixTree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def num_common(left, right):
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@given(st.lists(st.tuples(TOKENS, st.integers(0, 30)), max_size=25), TOKENS)
def test_a_walk_finds_what_a_scan_of_all_entries_finds(moves, asked):
    """An entry comes with each move, and an older one goes now and then."""
    tree, entries = PrefixTree(), {}
    for number, (tokens, dropped) in enumerate(moves):
        tree.add(tokens, number)
        entries[number] = tokens
        if dropped in entries:
            tree.remove(entries.pop(dropped), dropped)
    found = {}
    lengths = []
    for length, holders in tree.walk(asked):
        lengths.append(length)
        found |= dict.fromkeys(holders, length)
    assert lengths == sorted(set(found.values())), "a split outlives what it was made for"
    assert found == {
        number: common
        for number, tokens in entries.items()
        if (common := num_common(tokens, asked))
    }
    assert tree.is_empty == (not entries)


def test_a_prefix_as_long_as_a_context_is_compared_whole():
    tree = PrefixTree()
    long = tuple(range(100_000))
    tree.add(long, "a")
    tree.add((*long[:77_777], -1), "b")
    assert dict(tree.walk((*long[:99_999], -2))) == {77_777: {"a": None, "b": None},
                                                     99_999: {"a": None}}  # fmt: skip
