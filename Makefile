# `make train` and `make test` do everything on a machine that has Python 3.10 or newer with its headers and a
# C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NPROC ?= 2
# The release that tests, types and figures are checked with; docs/reference/torch.md has the others. `TORCH=torch` takes the newest.
TORCH ?= torch==2.13.0
# Three tests at a time on two cores: while ranks of one wait for each other or a child starts, another one runs.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# Each rank and each program of a test imports the package: compiled once, it takes half a second less.
export PYTHONDONTWRITEBYTECODE :=

# Where `make gpu` and `make gpu-bench` leave their results, and tests at a time on one GPU.
RESULTS ?= gpu-results
GPU_WORKERS ?= 8
GPU_TIMEOUT ?= 120
GPU := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} TORCHINDUCTOR_COMPILE_THREADS=2 TOKENIZERS_PARALLELISM=false PYTHONFAULTHANDLER=1 PYTHONPATH="$(CURDIR):$$PYTHONPATH"
GPU_PYTEST := $(PYTHON) -m pytest tests/gpu -p no:cacheprovider -p no:logging -p no:benchmark --timeout $(GPU_TIMEOUT) --durations 10

.PHONY: train test test-all test-fast gpu gpu-bench mutants lint docs docs-serve bench clean

train: $(VENV)/.installed
	$(BIN)/python -m examples.train_gpt --nproc $(NPROC)

# Of each product of parameters a covering array: every pair of values.
test: $(VENV)/.installed-test lint
	$(PYTEST) -m "not gpu and not full"

# The whole products, and the trials (tests/trials/README.md) with the frameworks that they use.
test-all: $(VENV)/.installed-trials lint
	$(PYTEST) -m "not gpu"

test-fast: $(VENV)/.installed-test
	$(PYTEST) -m "not gpu and not full and not distributed and not inductor and not packaging and not slow"

# On a machine with PyTorch for CUDA, by its own Python: nothing is installed. DSGRAPH_GPU_DEVICE=cpu rehearses it.
gpu:
	@export $(GPU); \
	DSGRAPH_GPU_RESULTS=$(RESULTS)/tests.json $(GPU_PYTEST) -m "gpu and not alone" -n $(GPU_WORKERS) --dist loadgroup; \
	shared=$$?; \
	DSGRAPH_GPU_RESULTS=$(RESULTS)/tests-alone.json $(GPU_PYTEST) -m "gpu and alone"; \
	alone=$$?; [ $$shared = 0 ] && [ $$alone = 0 ]

gpu-bench:
	@export $(GPU); $(PYTHON) -m benchmarks.gpu --json $(RESULTS)/benchmarks.json

# Breaks the code in one place at a time; for a night.
mutants: $(VENV)/.installed-trials
	$(BIN)/python -m tests.mutants --table tests/mutants.md

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs

# Broken links, missing anchors and pages outside the navigation fail.
docs: $(VENV)/.installed-test
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed-test
	$(BIN)/mkdocs serve

bench: $(VENV)/.installed-peers
	$(BIN)/python -m benchmarks.zero --json out.json

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[test,lint,docs]"
	touch $@

$(VENV)/.installed-trials: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable ".[trials]"
	touch $@

$(VENV)/.installed-peers: $(VENV)/.installed-test
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --editable ".[peers]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
