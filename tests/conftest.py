"""Every test has a cache of its own, except for the library's probe, which is about the machine."""

from __future__ import annotations

import os
from pathlib import Path

# One process tests files of every type; this is the one setting that is exact for all of them.
os.environ.setdefault("GGML_CPU_TILED_MM", "0")

import pytest

from skippy_mesh.starting import demo_path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def demo() -> Path:
    """SmolLM2: real weights, real text."""
    return demo_path()
