"""Text that must wait because it may become something that is not to be shown."""

from __future__ import annotations

from collections.abc import Sequence


def num_held(text: str, wanted: Sequence[str]) -> int:
    """The longest end of ``text``, in characters, that is the beginning of one of ``wanted`` and
    not yet all of it."""
    longest = max(map(len, wanted), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-size:]) and len(each) > size for each in wanted):
            return size
    return 0
