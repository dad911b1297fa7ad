"""A model named by a URL: fetched once per machine, whole or not at all.

Every stage asks for itself, so a cluster needs no folder that all its machines share. What was
fetched is never fetched again: a URL stands for one file, and ``#sha256=HEX`` behind it says which.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit, urlunsplit

from skippy_mesh.errors import ModelFileError
from stages.disk import Progress, cache_dir, content_digest, write_whole
from stages.gguf_file import part_names
from stages.gguf_format import MAGIC

_CHUNK_BYTES = 4 << 20
_TIMEOUT_S = 30.0
_MAX_BREAKS = 5
"""How often a connection may break without a byte in between."""
_PIN = re.compile(r"^sha256=([0-9a-fA-F]{64})$")


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def local_model(name: str, progress: Progress | None = None) -> Path:
    """The file behind ``name`` on this machine: a path as it is; of a URL the file it stands for,
    with all its parts where it is the first of several. Raises :class:`ModelFileError`."""
    if not is_url(name):
        return Path(name)
    url, _, pin = name.partition("#")
    found = _PIN.match(pin)
    if pin and found is None:
        raise ModelFileError(f"{shown(url)}: behind # goes sha256= and 64 hex digits, got {pin!r}")
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    paths = [
        _fetched(part, cache_dir() / "models" / key / file_name(part), progress)
        for part in _parts_of(url)
    ]
    if found is not None:
        digest = content_digest(paths)
        if digest != found[1].lower():
            for path in paths:
                path.unlink(missing_ok=True)
            raise ModelFileError(
                f"{shown(url)} has the digest sha256={digest}, not the {found[1].lower()} that was "
                "asked for, and was deleted"
            )
    return paths[0]


def file_name(url: str) -> str:
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    if not name.endswith(".gguf"):
        raise ModelFileError(f"{shown(url)} names no .gguf file")
    return name


def shown(url: str) -> str:
    """Without what may be secret: who asks, and the query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _parts_of(url: str) -> list[str]:
    """All parts of a model that is split, from the URL of its first; else ``url`` alone."""
    name = file_name(url)
    names = part_names(name)
    if names == [name]:
        return [url]
    if names[:1] != [name]:
        raise ModelFileError(f"{shown(url)} is not the first of its {len(names)} parts")
    head, _, tail = url.rpartition(name)
    return [f"{head}{part}{tail}" for part in names]


def _fetched(url: str, out: Path, progress: Progress | None) -> Path:
    if not out.exists():
        with _opened(url) as reply:
            total = _length_of(url, reply)
            download = _Download(url, reply, total, progress)
            write_whole(out, total, download.write, reuse=True)
    return out


class _Download:
    """One file on its way; a connection that breaks is taken up where it broke."""

    def __init__(
        self,
        url: str,
        reply: http.client.HTTPResponse,
        total: int,
        progress: Progress | None,
    ):
        self._url = url
        self._reply = reply
        self._total = total
        self._progress = progress
        self._version = reply.headers.get("ETag")

    def write(self, file: BinaryIO) -> None:
        done = num_breaks = 0
        while done < self._total:
            try:
                chunk = self._reply.read(min(_CHUNK_BYTES, self._total - done))
            except (OSError, http.client.HTTPException):
                chunk = b""
            if not chunk:
                num_breaks += 1
                if num_breaks > _MAX_BREAKS:
                    raise ModelFileError(
                        f"{shown(self._url)}: the connection broke {num_breaks} times after {done} "
                        f"of {self._total} bytes"
                    )
                self._go_on_at(done)
                continue
            if not done and not chunk.startswith(MAGIC):
                raise ModelFileError(f"{shown(self._url)} is no GGUF file")
            file.write(chunk)
            done += len(chunk)
            num_breaks = 0
            if self._progress is not None:
                self._progress(done, self._total)

    def _go_on_at(self, start: int) -> None:
        self._reply.close()
        self._reply = _opened(self._url, start)
        is_rest = self._reply.status == 206 or not start
        if not is_rest or self._reply.headers.get("ETag") != self._version:
            raise ModelFileError(
                f"{shown(self._url)}: the connection broke after {start} of {self._total} bytes, "
                "and the server does not go on there: try again"
            )


def _opened(url: str, start: int = 0) -> http.client.HTTPResponse:
    headers = {"User-Agent": "skippy_mesh", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        reply = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        raise ModelFileError(f"{shown(url)}: HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelFileError(f"{shown(url)} cannot be fetched: {reason}") from error
    assert isinstance(reply, http.client.HTTPResponse)
    return reply


def _length_of(url: str, reply: http.client.HTTPResponse) -> int:
    length = reply.headers.get("Content-Length", "")
    if not length.isdecimal() or not int(length):
        raise ModelFileError(f"{shown(url)}: the server does not say how long the file is")
    return int(length)
