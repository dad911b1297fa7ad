"""The rows of a long bench, kept one by one: what was measured is not measured again.

The first line of the file says what the rows are of: commit and settings. A bench that is started
again goes on only if that is the same, for rows of two engines would make no verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skippy_mesh.errors import UsageError

Row = dict[str, Any]


class Ledger:
    """``identity`` is compared, ``head`` only kept."""

    def __init__(self, path: Path, identity: Mapping[str, object], head: Mapping[str, object]):
        self._path = path
        self.rows: list[Row] = []
        self.head: dict[str, Any] = {**head, "identity": json.loads(json.dumps(identity))}
        if path.exists():
            self._go_on()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.head)

    def row(self, key: str, measure: Callable[[], Row]) -> Row:
        """The row of this key: the one that is there, or a new one, on disk before it returns."""
        for row in self.rows:
            if row["key"] == key:
                return row
        row = {"key": key, **measure()}
        self._append(row)
        self.rows.append(row)
        return row

    def _go_on(self) -> None:
        head, self.rows = read_rows(self._path)
        if head.get("identity") != self.head["identity"]:
            raise UsageError(
                f"{self._path} holds rows of commit {str(head.get('commit'))[:7]} or of other "
                f"settings: --fresh begins anew"
            )
        self.head = head

    def _append(self, entry: Mapping[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def set_aside(path: Path) -> None:
    """The rows that are there, so that the next bench begins anew."""
    if path.exists():
        path.replace(f"{path}.old")


def read_rows(path: Path) -> tuple[Row, list[Row]]:
    """Head and rows. A last line without its end was being written when the bench died; it is cut
    off, or the next row would be written behind it."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    entries = [json.loads(line) for line in whole.splitlines()]
    if not entries or "identity" not in entries[0]:
        raise UsageError(f"{path} is no file of rows: --fresh begins anew")
    return entries[0], entries[1:]
