"""The library under test is the stock one: built here from the pinned source by the known flags."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import llama_cpp
import pytest

from stages.native import tap_path

# What the environment says, before each test gets a cache of its own.
REAL_CACHE = os.environ.get("SKIPPY_CACHE_DIR")


@pytest.fixture
def wheel(monkeypatch):
    """``deploy/llama_wheel.py`` as a module, with the real cache."""
    if REAL_CACHE is None:
        monkeypatch.delenv("SKIPPY_CACHE_DIR")
    else:
        monkeypatch.setenv("SKIPPY_CACHE_DIR", REAL_CACHE)
    script = Path(__file__).parents[2] / "deploy" / "llama_wheel.py"
    spec = importlib.util.spec_from_file_location("llama_wheel", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_installed_library_was_built_from_the_pinned_source_and_flags(wheel):
    root = wheel.cache_dir() / "wheels"
    sdist = (root / wheel.SDIST_NAME).read_bytes()
    assert hashlib.sha256(sdist).hexdigest() == wheel.SDIST_SHA256
    compiler = wheel.compiler()
    flags = wheel.build_flags(compiler)
    home = wheel.wheel_home(root, wheel.build_key(compiler, flags))
    built = json.loads((home / "build.json").read_text())
    assert (built["version"], built["flags"]) == (llama_cpp.__version__, flags)
    package = Path(llama_cpp.__file__).parent
    with zipfile.ZipFile(next(home.glob("*.whl"))) as archive:
        inside = [name for name in archive.namelist() if name.startswith("llama_cpp/lib/")]
        libraries = [name for name in inside if name.endswith((".so", ".dylib"))]
        assert {"libllama", "libggml-base", "libggml-cpu"} <= {Path(n).stem for n in libraries}
        for name in libraries:
            assert (package / "lib" / Path(name).name).read_bytes() == archive.read(name), name


def test_a_source_that_is_not_the_pinned_one_is_refused(wheel, tmp_path):
    (tmp_path / wheel.SDIST_NAME).write_bytes(b"something else")
    with pytest.raises(SystemExit, match="not the pinned source"):
        wheel.fetch_sdist(tmp_path)


# Without site and environment no other install is known: there is what the folders have, no more.
LOAD_TAP = """
import sys
sys.path[:0] = sys.argv[1:]
from stages.native import tap_library, tap_path
tap_library()
print(tap_path())
"""


def test_uploaded_sources_take_the_installed_tap_of_the_same_version_only(tmp_path):
    """As ``ray job submit --working-dir .`` leaves them: without what git ignores."""
    tap = tap_path()
    uploaded, installed = tmp_path / "uploaded", tmp_path / "installed"
    for name in ("stages", "skippy_mesh"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(tap.parents[1] / name, uploaded / name, ignore=ignored)
    folders = [str(uploaded), str(installed), sysconfig.get_paths()["purelib"]]

    def load():
        command = [sys.executable, "-E", "-S", "-c", LOAD_TAP, *folders]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    assert "compiled part of skippy_mesh is missing" in load().stderr
    (installed / "stages").mkdir(parents=True)
    for file in (tap, tap.with_name("tap.c")):
        shutil.copy(file, installed / "stages")
    done = load()
    found = f"{installed / 'stages' / tap.name}\n"
    assert (done.returncode, done.stdout) == (0, found), done.stderr
    with (installed / "stages" / "tap.c").open("a") as source:
        source.write("/* of another day */\n")
    assert "another version than the one installed in" in load().stderr
