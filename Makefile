# make serve   set up if needed, then answer chats from the demo model on two Ray stages
# make test    set up if needed, then lint, types, import contracts and all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup serve test check test-long peers clean
setup: $(READY)

# Everything that changes what is installed; sources are installed in place and need no rebuild.
$(READY): pyproject.toml stages/tap.c deploy/llama_wheel.py deploy/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) sh deploy/setup.sh
	@touch $@

serve: $(READY)
	@$(BIN)/skippy-mesh serve demo --stages 2

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

test-long: $(READY)
	$(BIN)/python -m pytest -m long --timeout 3600

# llama-server, the RPC server and llama-batched-bench from the source inside the pinned sdist,
# and what llama-cpp-python's server needs.
peers: $(READY)
	$(BIN)/python -m bench.programs

clean:
	rm -rf $(VENV) build *.egg-info
