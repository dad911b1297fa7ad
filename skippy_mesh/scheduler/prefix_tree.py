"""A radix tree over token ids: who holds the longest beginning of a prompt.

RadixAttention's index (SGLang, arXiv 2312.07104), with one difference: a path is held by lanes, and
what is looked up is not a block of memory but a lane to share from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Tokens = tuple[int, ...]


class _Node(Generic[Entry]):
    """``tokens`` lead here from the parent; every one of ``entries`` begins with the whole path."""

    __slots__ = ("children", "entries", "tokens")

    def __init__(self, tokens: Tokens, entries: dict[Entry, None]):
        self.tokens = tokens
        self.entries = entries
        self.children: dict[int, _Node[Entry]] = {}


class PrefixTree(Generic[Entry]):
    """Entries by the tokens they begin with. Takes time in the length of the tokens, not in the
    number of entries."""

    def __init__(self) -> None:
        self._root: _Node[Entry] = _Node((), {})

    @property
    def is_empty(self) -> bool:
        return not self._root.children

    def add(self, tokens: Tokens, entry: Entry) -> None:
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                node.children[tokens[at]] = _Node(tokens[at:], {entry: None})
                return
            num_common = _num_common(child.tokens, tokens, at)
            if num_common < len(child.tokens):
                child = _split(node, child, num_common)
            child.entries[entry] = None
            node, at = child, at + num_common

    def remove(self, tokens: Tokens, entry: Entry) -> None:
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children[tokens[at]]
            del child.entries[entry]
            if not child.entries:
                del node.children[tokens[at]]  # everything below was this entry's alone
                if node is not self._root:
                    _join(node)
                return
            node, at = child, at + len(child.tokens)
        if node is not self._root:
            _join(node)

    def walk(self, tokens: Tokens) -> Iterator[tuple[int, dict[Entry, None]]]:
        """Ever more tokens of the beginning, and the entries that have all of them in common."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                return
            num_common = _num_common(child.tokens, tokens, at)
            yield at + num_common, child.entries
            if num_common < len(child.tokens):
                return
            node, at = child, at + num_common


def _split(parent: _Node[Entry], child: _Node[Entry], size: int) -> _Node[Entry]:
    """Put a node between the two that ends after ``size`` of the child's tokens."""
    upper = _Node(child.tokens[:size], dict(child.entries))
    child.tokens = child.tokens[size:]
    upper.children[child.tokens[0]] = child
    parent.children[upper.tokens[0]] = upper
    return upper


def _join(node: _Node[Entry]) -> None:
    """Undo a split nobody needs any more: whoever begins with ``node`` goes on to its one child. Or
    what stays for long would be walked in steps of single tokens one day."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if len(child.entries) == len(node.entries):
            node.tokens += child.tokens
            node.entries, node.children = child.entries, child.children


def _num_common(edge: Tokens, tokens: Tokens, at: int) -> int:
    """How many of ``edge`` are found in ``tokens`` from ``at`` on; halving, because slices compare
    at the speed of C."""
    low, high = 0, min(len(edge), len(tokens) - at)
    if edge[:high] == tokens[at : at + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
