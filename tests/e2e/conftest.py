"""Models made once for all tests here, and a cache they can share."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.probe import can_repack
from tests.crowd import Made
from tests.models import make_model


@pytest.fixture(scope="module")
def ray_dir() -> Iterator[Path]:
    # Short and not under tmp_path: the names of Unix sockets end at 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="skippy-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """``made(family, dtype, **knobs)``: the same file for the same arguments."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(family: str, dtype: str, **knobs: int) -> Made:
        name = "-".join((family, dtype, *(f"{key}{value}" for key, value in knobs.items())))
        return Made(make_model(family, folder / f"{name}.gguf", dtype=dtype, **knobs))

    return make


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture(scope="session")
def repacks(session_cache: Path) -> bool:
    """The library's probe, run once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPPY_CACHE_DIR", str(session_cache))
        return can_repack()


@pytest.fixture
def shared_cache(own_cache: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of a cache of its own: slices and verdicts of models that no test changes."""
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(session_cache))
    return session_cache


@pytest.fixture
def probed_cache(own_cache: Path, repacks: bool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for a test that plants a fault; only the probe is not repeated."""
    monkeypatch.setattr("stages.part.can_repack", lambda: repacks)
    return own_cache
