"""Build the stock llama-cpp-python wheel once per machine and print its path.

Compiling llama.cpp takes minutes, and pip reuses a cached wheel whatever CMAKE_ARGS says. So the
wheel lives outside the checkout under a name made of everything that changes the machine code:
version, compiler flags, compiler, Python and CPU features. Standard library only, because it runs
before anything is installed.

    python deploy/llama_wheel.py            build if needed, print the wheel's path on stdout
    python deploy/llama_wheel.py --sdist    fetch if needed, print the path of the pinned source
    python deploy/llama_wheel.py --key      print all that changes the machine code, as JSON
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SDIST_NAME = f"llama_cpp_python-{VERSION}.tar.gz"
# CPU features whose presence changes what -march=native compiles.
ISA_PREFIXES = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "gfni", "vaes")
# A CPU may advertise AMX and still die on its first tile instruction, and AMX kernels are not
# among those measured as exact (skippy_mesh/ARCHITECTURE.md, "Exactness").
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")


def cache_dir() -> Path:
    root = os.environ.get("SKIPPY_CACHE_DIR")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skippy-mesh"


def compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    sys.exit("llama_wheel: no C compiler found: install gcc and g++ (Debian: apt-get install g++)")


def cpu_features() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    words = next((ln.split(":", 1)[1] for ln in lines if ln.lower().startswith("flags")), None)
    if words is not None:
        return sorted(w for w in set(words.split()) if w.startswith(ISA_PREFIXES))
    return sorted(
        {w for ln in lines if ln.startswith("Features") for w in ln.split(":")[1].split()}
    )


def build_flags(cc: str) -> list[str]:
    """Stock flags, less AMX where this compiler knows it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    probe = [*shlex.split(cc), *NO_AMX, "-E", "-x", "c", os.devnull]
    known = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return list(NO_AMX) if known else []


def build_key(cc: str, flags: list[str]) -> dict[str, object]:
    first = subprocess.run(
        [*shlex.split(cc), "--version"], capture_output=True, text=True, check=False
    )
    return {
        "version": VERSION,
        "flags": flags,
        "compiler": first.stdout.split("\n", 1)[0],
        "python": sys.implementation.cache_tag,
        "machine": platform.machine(),
        "cpu": cpu_features(),
    }


def wheel_home(root: Path, key: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return root / f"llama-cpp-python-{VERSION}-{digest}"


def fetch_sdist(into: Path) -> Path:
    path = into / SDIST_NAME
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=into) as tmp:
            run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "--no-binary",
                    "llama-cpp-python",
                    "-d",
                    tmp,
                    f"llama-cpp-python=={VERSION}",
                ]
            )
            found = next(Path(tmp).glob("llama_cpp_python-*.tar.gz"))
            found.replace(path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != SDIST_SHA256:
        sys.exit(f"llama_wheel: {path} is not the pinned source: delete it and try again")
    return path


def source_tree(into: Path) -> Path:
    """The pinned source, unpacked; llama.cpp is its ``vendor/llama.cpp``."""
    tree = into / SDIST_NAME.removesuffix(".tar.gz")
    if not tree.exists():
        with tempfile.TemporaryDirectory(dir=into) as tmp:
            with tarfile.open(fetch_sdist(into)) as tar:
                tar.extractall(tmp, filter="data")
            (Path(tmp) / tree.name).replace(tree)
    return tree


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"llama_wheel: failed ({done.returncode}): {shlex.join(command)}")


def build_wheel(into: Path, key: dict[str, object], flags: list[str]) -> None:
    print(
        f"llama_wheel: compiling llama-cpp-python {VERSION} (about 8 minutes on 2 cores, once; "
        f"kept in {into})",
        file=sys.stderr,
        flush=True,
    )
    joined = " ".join(flags)
    cmake = [f"-DCMAKE_C_FLAGS='{joined}'", f"-DCMAKE_CXX_FLAGS='{joined}'"] if flags else []
    env = {
        **os.environ,
        "CMAKE_ARGS": " ".join(cmake),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
    }
    with tempfile.TemporaryDirectory(dir=into.parent) as tmp:
        run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--no-cache-dir",
                "--no-binary",
                "llama-cpp-python",
                "-w",
                tmp,
                str(fetch_sdist(into.parent)),
            ],
            env,
        )
        (Path(tmp) / "build.json").write_text(json.dumps(key, indent=1))
        os.chmod(tmp, 0o755)
        shutil.copytree(tmp, into)


def main(argv: list[str]) -> int:
    root = cache_dir() / "wheels"
    root.mkdir(parents=True, exist_ok=True)
    if argv == ["--sdist"]:
        print(source_tree(root))
        return 0
    cc = compiler()
    flags = build_flags(cc)
    key = build_key(cc, flags)
    if argv == ["--key"]:
        print(json.dumps(key))
        return 0
    if argv:
        sys.exit("llama_wheel: usage: llama_wheel.py [--sdist | --key]")
    home = wheel_home(root, key)
    with open(root / f"{home.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may set up at once
        if not any(home.glob("*.whl")):
            shutil.rmtree(home, ignore_errors=True)
            build_wheel(home, key, flags)
    print(next(home.glob("*.whl")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
