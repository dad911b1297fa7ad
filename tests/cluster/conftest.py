"""One local cluster a module, in a short folder: Unix socket names end at 107 bytes."""

from __future__ import annotations

import shutil
import tempfile

import pytest

from coordinator.launch import ray_cluster
from tests.models import make_llama


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tempfile.mkdtemp(prefix="skippy-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("SKIPPY_CACHE_DIR", str(tmp_path_factory.mktemp("mesh") / "cache"))
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_cluster(address=None, num_cpus=4, namespace="test"):
            yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # q8_0 needs no padding to be exact, so the library alone is the other side.
    return make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="q8_0")
