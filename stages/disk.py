"""The user's cache folder, and files that appear there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from skippy_mesh.errors import ModelFileError, NoSpaceError

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""

_NUM_DIGITS = 64  # of a sha256 in hex


def cache_dir() -> Path:
    root = os.environ.get("SKIPPY_CACHE_DIR")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skippy-mesh"


def write_whole(
    out: Path, num_bytes: int, write: Callable[[BinaryIO], object], *, reuse: bool = False
) -> None:
    """Let ``write`` fill ``out`` with exactly ``num_bytes``: others see all of them or no file.

    One process at a time writes a given ``out``, the others wait. What a killed one left behind is
    overwritten. With ``reuse`` an ``out`` of the right size stays as it is. Raises
    :class:`NoSpaceError`, or :class:`ModelFileError` for a folder that cannot be written.
    """
    if reuse and _is_whole(out, num_bytes):
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.with_name(out.name + ".part")) as part:
            try:
                if reuse and _is_whole(out, num_bytes):
                    os.unlink(part.name)
                else:
                    _fill(part, num_bytes, write)
                    os.replace(part.name, out)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
        _sync_folder(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(out.parent, num_bytes) from error
        raise ModelFileError(
            f"cannot write {out}: {error.strerror or error}: choose another folder "
            f"(for the cache, set SKIPPY_CACHE_DIR)"
        ) from error


def write_text(out: Path, text: str) -> None:
    """A small file, whole or not at all. It is a memo: one that cannot be kept is no error."""
    data = text.encode()
    with suppress(ModelFileError):
        write_whole(out, len(data), lambda file: file.write(data))


def _fill(part: BinaryIO, num_bytes: int, write: Callable[[BinaryIO], object]) -> None:
    part.seek(0)
    part.truncate()
    folder = Path(part.name).parent
    if shutil.disk_usage(folder).free < num_bytes:
        raise _no_room(folder, num_bytes)
    write(part)
    part.flush()
    os.fsync(part.fileno())
    assert part.tell() == num_bytes


def _sync_folder(folder: Path) -> None:
    """A new name, too, must outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(out: Path, num_bytes: int) -> bool:
    try:
        return out.stat().st_size == num_bytes
    except OSError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """``path``, open and exclusively locked. The lock dies with its process, however that ends."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held the lock before us has renamed or removed the file we opened.
            if _is_at(path, file):
                yield file
                return


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _no_room(folder: Path, num_bytes: int) -> NoSpaceError:
    return NoSpaceError(
        f"no space in {folder}: {num_bytes} bytes needed, {shutil.disk_usage(folder).free} free: "
        f"free some or choose another folder (for the cache, set SKIPPY_CACHE_DIR)"
    )


def fingerprint(paths: Sequence[Path]) -> str:
    """Changes when one of the files does, without reading any."""
    facts = []
    for path in paths:
        stat = path.stat()
        # The change time catches a file replaced by one of equal size and copied times.
        facts.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def content_digest(paths: Sequence[Path]) -> str:
    """sha256 of the files' bytes in order, in hex. Remembered, so a second start reads nothing, and
    of several who ask at once, stages of a machine or threads, one reads and the others wait."""
    memo = cache_dir() / "digests" / fingerprint(paths)
    # What goes wrong with the memo is no error; with the files, it does so again below.
    with suppress(ModelFileError, OSError):
        write_whole(memo, _NUM_DIGITS, lambda file: file.write(_digest(paths)), reuse=True)
        return memo.read_text()
    return _digest(paths).decode()


def _digest(paths: Sequence[Path]) -> bytes:
    sha256 = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: sha256)
    return sha256.hexdigest().encode()
