"""Build what the mesh is measured against: llama.cpp's own server, RPC server and batched bench.

They come from the very source and with the CPU flags of the wheel the mesh runs on, so a
difference between them and us is not a difference of kernels. Beside them, what llama-cpp-python's
own server needs and the mesh does not. Kept outside the checkout like the wheel. ``python -m
bench.programs`` builds what is missing and prints the paths.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from skippy_mesh.errors import RuntimeUnavailableError, UsageError

TARGETS = ("llama-server", "ggml-rpc-server", "llama-batched-bench")
LLAMA_CPP_PYTHON = "llama-cpp-python"  # the name of its server, too
WHEEL_SCRIPT = Path(__file__).resolve().parents[1] / "deploy" / "llama_wheel.py"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # whole programs: they outlive their build tree
    "-DGGML_RPC=ON",
    "-DLLAMA_OPENSSL=OFF",  # loopback needs no TLS
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # the source has no web page, and a build must not fetch one
)


def ask_wheel_script(question: str) -> str:
    command = [sys.executable, str(WHEEL_SCRIPT), question]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeUnavailableError(f"{shlex.join(command)} failed ({done.returncode})")
    return done.stdout.strip()


def locate() -> tuple[Path, dict[str, object], Path]:
    """The pinned source, all that changes the machine code, and where the programs belong:
    <cache>/peers/<digest of that>."""
    key: dict[str, object] = json.loads(ask_wheel_script("--key"))
    del key["python"]  # these programs hold none
    key["options"] = OPTIONS
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    source = Path(ask_wheel_script("--sdist"))
    return source, key, source.parent.parent / "peers" / digest


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeUnavailableError(f"failed ({done.returncode}): {shlex.join(command)}")


def compile_into(home: Path, source: Path, key: dict[str, object]) -> None:
    """Configure, compile, and move the programs into place all at once.

    An interrupted build leaves its tree, and the next one goes on from there.
    """
    if shutil.which("cmake") is None:
        raise RuntimeUnavailableError("no cmake found (Debian: apt-get install cmake)")
    print(f"bench.programs: compiling {', '.join(TARGETS)} (about 15 minutes on 2 cores, once; "
          f"kept in {home})", file=sys.stderr, flush=True)  # fmt: skip
    tree, ready = home.with_suffix(".build"), home.with_suffix(".new")
    flags = " ".join(str(flag) for flag in key["flags"]) if isinstance(key["flags"], list) else ""
    run(["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", str(tree), *OPTIONS,
         f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"])  # fmt: skip
    run(["cmake", "--build", str(tree), "--parallel", str(os.cpu_count() or 1),
         "--target", *TARGETS])  # fmt: skip
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    for name in TARGETS:
        shutil.copy2(tree / "bin" / name, ready / name)
    (ready / "build.json").write_text(json.dumps(key, indent=1) + "\n")
    ready.replace(home)
    shutil.rmtree(tree)


def server_requirements() -> list[str]:
    """What llama-cpp-python says its server needs, beside what the package itself does."""
    entries = [text.partition(";") for text in requires("llama-cpp-python") or ()]
    return [name.strip() for name, _, marker in entries if 'extra == "server"' in marker]


def install_into(site: Path) -> None:
    """A folder of packages for the server alone: their versions need not be those of the mesh."""
    ready = site.with_suffix(".new")
    shutil.rmtree(ready, ignore_errors=True)
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(ready),
         *server_requirements()])  # fmt: skip
    ready.replace(site)


def paths_in(home: Path) -> dict[str, Path]:
    """By name: the programs, and the folder of packages, which is one Python's."""
    major, minor = sys.version_info[:2]
    return {
        **{name: home / name for name in TARGETS},
        LLAMA_CPP_PYTHON: home / f"{LLAMA_CPP_PYTHON}-{major}-{minor}",
    }


@functools.cache
def find_peers() -> dict[str, Path]:
    """What :func:`build` made; an error that says what to run if it is not there."""
    _, _, home = locate()
    found = paths_in(home)
    missing = [name for name, path in found.items() if not path.exists()]
    if missing:
        names = ", ".join(missing)
        raise UsageError(f"not built on this machine: {names}. Run `make peers` first")
    return found


def build() -> dict[str, Path]:
    source, key, home = locate()
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may build at once
        if not home.is_dir():
            compile_into(home, source, key)
        found = paths_in(home)
        if not found[LLAMA_CPP_PYTHON].is_dir():
            install_into(found[LLAMA_CPP_PYTHON])
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.programs", description=__doc__)
    parser.parse_args(argv)
    for name, path in build().items():
        print(f"{name} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
