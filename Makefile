# `make train` and `make test` do everything on a machine that has Python 3.10 or newer and nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NPROC ?= 2

.PHONY: train test test-fast lint bench clean

train: $(VENV)/.installed
	$(BIN)/python -m examples.train_gpt --nproc $(NPROC)

test: $(VENV)/.installed-test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu"

test-fast: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not distributed and not inductor and not packaging"

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-peers
	$(BIN)/python -m benchmarks.zero --json out.json

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[test,lint]"
	touch $@

$(VENV)/.installed-peers: $(VENV)/.installed-test
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --editable ".[peers]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
