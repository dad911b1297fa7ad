"""Build what the mesh is measured against: llama.cpp's own server, RPC server and batched bench.

They come from the very source and with the CPU flags of the wheel the mesh runs on, so a
difference between them and us is not a difference of kernels. Kept outside the checkout like the
wheel. ``python -m bench.peers build`` prints their paths.
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
from pathlib import Path

from skippy_mesh.errors import RuntimeUnavailableError, UsageError

TARGETS = ("llama-server", "ggml-rpc-server", "llama-batched-bench")
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
    print(f"bench.peers: compiling {', '.join(TARGETS)} (about 15 minutes on 2 cores, once; kept "
          f"in {home})", file=sys.stderr, flush=True)  # fmt: skip
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


@functools.cache
def find_peers() -> dict[str, Path]:
    """The built programs by name; an error that says what to run if they are not there."""
    _, _, home = locate()
    if not home.is_dir():
        raise UsageError("the peers are not built on this machine: run `make peers` first")
    return {name: home / name for name in TARGETS}


def build() -> dict[str, Path]:
    source, key, home = locate()
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may build at once
        if not home.is_dir():
            compile_into(home, source, key)
    return {name: home / name for name in TARGETS}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("command", choices=["build"], nargs="?")
    parser.parse_args(argv)
    for name, path in build().items():
        print(f"{name} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
