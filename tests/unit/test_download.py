"""A model by its URL: whole, once, and what it was pinned to; or one clear error and no file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skippy_mesh.errors import ModelFileError
from stages import download
from stages.download import local_model, shown

DATA = b"GGUF" + bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()


class Site:
    """What a server has, and how it misbehaves: it breaks off after so many bytes of each reply."""

    def __init__(self) -> None:
        self.files = {"/m.gguf": DATA}
        self.breaks_after: int | None = None
        self.knows_ranges = True
        self.has_length = True
        self.version = "1"
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    with serving_site(Site()) as site:
        yield site


@contextmanager
def serving_site(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            range_ = self.headers.get("Range")
            path = self.path.partition("?")[0]
            site.asked.append((path, range_))
            data = site.files.get(path)
            if data is None:
                self.send_error(404)
                return
            start = int(range_.removeprefix("bytes=").rstrip("-")) if range_ else 0
            start = start if site.knows_ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("ETag", site.version)
            if site.has_length:
                self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            end = len(data) if site.breaks_after is None else start + site.breaks_after
            self.wfile.write(data[start:end])

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        site.url = f"http://127.0.0.1:{server.server_port}"
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    return [path for path in (cache / "models").rglob("*") if path.is_file()]


def test_a_path_is_left_alone() -> None:
    assert local_model("models/m.gguf") == Path("models/m.gguf")


def test_a_url_is_fetched_once_and_then_needs_no_server(site: Site, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = local_model(f"{site.url}/m.gguf", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == DATA and path.name == "m.gguf"
    assert seen[-1] == (len(DATA), len(DATA))
    assert local_model(f"{site.url}/m.gguf") == path
    assert site.asked == [("/m.gguf", None)] and kept(cache) == [path]


def test_two_urls_of_one_name_are_two_files(site: Site) -> None:
    site.files["/other/m.gguf"] = DATA + b"more"
    assert local_model(f"{site.url}/m.gguf").read_bytes() == DATA
    assert local_model(f"{site.url}/other/m.gguf").read_bytes() == DATA + b"more"


def test_a_connection_that_breaks_is_taken_up_where_it_broke(site: Site) -> None:
    site.breaks_after = 3000
    assert local_model(f"{site.url}/m.gguf").read_bytes() == DATA
    assert [range_ for _, range_ in site.asked] == [
        None, "bytes=3000-", "bytes=6000-", "bytes=9000-"
    ]  # fmt: skip


def test_a_server_that_says_nothing_more_is_given_up(site: Site, cache: Path) -> None:
    site.breaks_after = 0
    with pytest.raises(ModelFileError, match="broke 6 times after 0 of 10244 bytes"):
        local_model(f"{site.url}/m.gguf")
    assert kept(cache) == []


@pytest.mark.parametrize("changes", [{"knows_ranges": False}, {"version": "2"}])
def test_a_broken_download_is_never_patched_with_other_bytes(
    site: Site, cache: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """A server that starts over, or has another file by now, would leave a file that is neither."""
    site.breaks_after = 3000
    opened = download._opened

    def changed(url: str, start: int = 0) -> Any:
        if start:
            for name, value in changes.items():
                setattr(site, name, value)
        return opened(url, start)

    monkeypatch.setattr(download, "_opened", changed)
    with pytest.raises(ModelFileError, match="after 3000 of 10244 bytes, and the server does not"):
        local_model(f"{site.url}/m.gguf")
    assert kept(cache) == []


def test_a_pin_is_checked_at_every_start(site: Site, cache: Path) -> None:
    path = local_model(f"{site.url}/m.gguf#sha256={SHA256.upper()}")
    assert local_model(f"{site.url}/m.gguf#sha256={SHA256}") == path
    with pytest.raises(ModelFileError, match=f"sha256={SHA256}, not the {'0' * 64} .* deleted"):
        local_model(f"{site.url}/m.gguf#sha256={'0' * 64}")
    assert kept(cache) == []


def test_all_parts_come_with_the_first(site: Site, cache: Path) -> None:
    for part in (1, 2, 3):
        site.files[f"/m-0000{part}-of-00003.gguf"] = DATA + bytes([part])
    path = local_model(f"{site.url}/m-00001-of-00003.gguf?key=secret")
    assert sorted(kept(cache)) == [path.with_name(f"m-0000{n}-of-00003.gguf") for n in (1, 2, 3)]
    with pytest.raises(ModelFileError, match="is not the first of its 3 parts"):
        local_model(f"{site.url}/m-00002-of-00003.gguf")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nothing.gguf", "HTTP 404"),
        ("/page.gguf", "is no GGUF file"),
        ("/m.safetensors", "names no .gguf file"),
        ("/m.gguf#sha1=abc", "sha256= and 64 hex digits, got 'sha1=abc'"),
        ("/empty.gguf", "does not say how long"),
    ],
)
def test_what_is_no_model_is_one_error_and_no_file(
    site: Site, cache: Path, path: str, says: str
) -> None:
    site.files |= {"/page.gguf": b"<html>sign in</html>", "/empty.gguf": b""}
    with pytest.raises(ModelFileError, match=says):
        local_model(f"{site.url}{path}")
    assert kept(cache) == []


def test_a_length_must_be_told(site: Site) -> None:
    site.has_length = False
    with pytest.raises(ModelFileError, match="does not say how long the file is"):
        local_model(f"{site.url}/m.gguf")


def test_a_server_that_is_not_there_is_named_without_secrets() -> None:
    with serving_site(Site()) as gone:
        pass
    with pytest.raises(ModelFileError, match="cannot be fetched") as caught:
        local_model(f"{gone.url}/m.gguf?token=secret")
    assert "secret" not in str(caught.value)
    assert shown("https://me:pass@host:1/a/m.gguf?t=1#x") == "https://host:1/a/m.gguf"
