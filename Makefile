# Two commands: `make demo` trains a small K3 on this machine, `make test` proves the house stands.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo check test test-slow test-soak test-gpu clean

setup: $(READY)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Perilune needs Python 3.11 or newer.")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all,dev]'
	touch $@

demo: $(READY)
	$(BIN)/perilune run recipes/tiny-cpu.toml --out runs/demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One thread a worker, two workers: faster than two threads in one process for tests of small tensors.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not soak and not gpu and not kvm"

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not soak and not gpu and not kvm"

# Not part of CI: microVMs killed, bombed and made by the hundred, for the better part of an hour.
test-soak: $(READY)
	$(BIN)/python -m pytest -m soak

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

clean:
	rm -rf $(VENV) runs
