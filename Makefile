# Everything happens in a virtual environment of this checkout's own, .venv. What is installed in it
# is remembered by stamps: a second `make bench` or `make test` installs nothing.
#
#   PYTHON       the Python to build .venv with; default: python3.11, 3.12 or 3.13, else python3
#   TORCH_INDEX  package index to take torch from, where the default one's CUDA is too new
#   SUITE        what `make bench` measures
#   WORKERS      processes that `make test` spreads its files over; a third of them waits most of the time
#   GPU_WORKERS  processes of `make test-gpu`: they compile kernels on the CPU
#   ROUNDS       seeded rounds of each fault that `make test-faults` goes through
#   ARGS         more arguments for what `make bench`, `make test` or `make dashboard` starts

PYTHON ?=
TORCH_INDEX ?=
SUITE ?= smoke
WORKERS ?= 3
GPU_WORKERS ?= 12
ROUNDS ?= 1
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
# Without bytecode, which pip makes of all 23,000 files on one core: Python makes and keeps that of
# what it imports, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=
PIP = $(PY) -m pip --disable-pip-version-check --quiet install --no-compile
STAMPS := $(VENV)/.stamps

TORCH := $(shell grep '^torch==' constraints.txt)
CUDA := $(shell ci/install/cuda-extra)
# A driver that comes or goes makes the stamp another one, so the right extra is installed.
MACHINE := $(or $(CUDA),cpu)
PACKAGE := $(STAMPS)/package-$(MACHINE)
TESTING := $(STAMPS)/testing-$(MACHINE)
comma := ,

.DEFAULT_GOAL := help
.PHONY: help bench dashboard testing test test-slow test-gpu test-gpu-all test-faults lint style checks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

bench: $(PACKAGE) ## set up .venv, measure the smoke suite here, print a table and what to do next
	@$(VENV)/bin/flexq-bench run $(SUITE) $(ARGS)
	@echo "next: $(VENV)/bin/flexq-bench tour, or: $(VENV)/bin/flexq-bench demo --open"

dashboard: $(PACKAGE) ## open the stored results in the browser
	@$(VENV)/bin/flexq-bench dashboard --open $(ARGS)

FAST_TESTS = $(PY) -m pytest -m "not slow and not gpu and not faults" --ignore tests/gpu --ignore tests/faults

testing: $(TESTING) ## set up .venv for tests

# Tests run while mypy has one core. First they are collected: that makes the bytecode that every
# worker needs.
test: $(TESTING) ## set up .venv for tests, check style, types and imports, run the fast tests
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory checks & checks=$$!; \
	  $(FAST_TESTS) --collect-only -qq >/dev/null 2>&1; \
	  $(FAST_TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
	  wait $$checks || { echo "make lint fails: see above" >&2; exit 1; }; exit $$tests

test-slow: $(TESTING) ## the tests that take longer
	$(PY) -m pytest -m "slow and not gpu and not faults" $(ARGS)

# Processes share the CPU: a thread of numpy and torch each, or they would wait for each other.
GPU_TESTS = $(PY) -m pytest tests/gpu -p no:benchmark
TOGETHER = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(GPU_TESTS) -m "not alone" -n $(GPU_WORKERS) --dist worksteal

test-gpu: $(TESTING) ## the tests that need an NVIDIA GPU, on cases that cover each option
	$(TOGETHER) $(ARGS)
	$(GPU_TESTS) -m alone $(ARGS)

test-gpu-all: $(TESTING) ## all cases of the tests that need an NVIDIA GPU: an hour; ARGS="--shard 1/2"
	$(TOGETHER) --every-case $(ARGS)
	$(GPU_TESTS) -m alone --every-case $(ARGS)

test-faults: $(TESTING) ## kills, outages, cuts and 2,000 inputs of nonsense; ROUNDS=20 rounds
	FAULT_ROUNDS=$(ROUNDS) $(PY) -m pytest -m faults tests/faults $(ARGS)

lint: style checks ## style, types, the direction of imports and dead code

style: $(TESTING)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

checks: $(TESTING)
	$(PY) -m mypy & mypy=$$!; $(VENV)/bin/lint-imports --no-logo && $(PY) -m vulture; others=$$?; \
	  wait $$mypy && exit $$others

clean: ## remove .venv and everything else that was built; stored results stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/python: ci/install/find-python
	@python=$$(ci/install/find-python $(PYTHON)) && \
	  echo "making $(VENV) with $$python" && \
	  "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first and by exact version: a range would take the newest build, with gigabytes of CUDA
# libraries. Before it a pip that needs half of the time of Python 3.11's own.
$(STAMPS)/torch: constraints.txt $(STAMPS)/python
	@$(PIP) -c constraints.txt --upgrade pip || echo "keeping the pip at hand"
	@echo "installing $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(PACKAGE): pyproject.toml constraints.txt $(STAMPS)/torch
	@echo "installing flexq-bench[all$(if $(CUDA),$(comma)$(CUDA))] and what it needs"
	@$(PIP) -c constraints.txt -e '.[all$(if $(CUDA),$(comma)$(CUDA))]'
	@rm -f $(STAMPS)/package-* $(STAMPS)/testing-*
	@touch $@

# The package as well: pip would need as long for each.
$(TESTING): pyproject.toml constraints.txt $(STAMPS)/torch
	@echo "installing flexq-bench[test$(if $(CUDA),$(comma)$(CUDA))] and what it needs"
	@$(PIP) -c constraints.txt -e '.[test$(if $(CUDA),$(comma)$(CUDA))]'
	@rm -f $(STAMPS)/package-* $(STAMPS)/testing-*
	@touch $(PACKAGE) $@
