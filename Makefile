# Everything a target writes stays in the checkout (.venv, .cache), pip's own cache aside.

# The first recent enough of these; override with make PYTHON=/path/to/python3.11
CANDIDATES := python3.11 python3 python
IS_RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for candidate in $(CANDIDATES); do \
	$$candidate -c '$(IS_RECENT)' 2>/dev/null && echo $$candidate && break; done)
PYTHON_FOUND = $(or $(PYTHON),$(error No Python 3.11 or newer among $(CANDIDATES); set PYTHON))
WORKERS ?= 2
CPU ?= native
LANE ?= test
# Release of vLLM that tests run on; another than 0.32 has an environment of its own over .venv
VLLM ?= 0.32
TOOL := .venv/bin/python .ci/local_caches.py
RUN := .venv$(addprefix -,$(filter-out 0.32,$(VLLM)))/bin/python .ci/local_caches.py
TESTS := $(if $(filter-out 0.32,$(VLLM)),$(addprefix tests/test_,plugin quantizer examples package))
PYTEST = OMP_NUM_THREADS=1 $(RUN) python -m pytest --cpu $(CPU) -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo eval all test quick check dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## Install everything into .venv, unless it is up to date; vLLM 0.33 over it: VLLM=0.33
	@$(PYTHON_FOUND) .ci/install.py $(VLLM)

demo: venv ## Run the demo; with a mixture of experts: ARGS=--moe
	$(RUN) python -m examples.demo $(ARGS)

eval: venv ## Measure what quantising costs a small model, variant by variant
	$(RUN) python -m examples.accuracy demo

all: check ## Run every check and every test, on each release of vLLM, and record that all passed
	$(PYTEST) --record
	$(MAKE) venv VLLM=0.33
	$(MAKE) test VLLM=0.33 LANE=all

test: check ## Run every check, then the tests; thorough ones of changed sources alone; CPU=avx2
	$(PYTEST) --lane $(LANE) $(TESTS)

quick: venv ## Run the short tests: without the emulator, engines and other processes
	$(PYTEST) --quick --durations 15 $(TESTS)

check: venv ## Lint, check the format, the docstrings, the types and the import contracts
	$(TOOL) ruff check .
	$(TOOL) ruff format --check .
	$(TOOL) python .ci/docstrings.py
	$(TOOL) mypy
	$(TOOL) lint-imports --no-logo --cache-dir .cache/import-linter

dist: ## Build the source distribution and, from it, the wheel into dist; installs no vLLM
	rm -rf dist *.egg-info  # a file list kept there would be taken up again
	$(PYTHON_FOUND) -m venv --clear .cache/build
	.cache/build/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1
	.cache/build/bin/python -m build

clean: ## Remove whatever the other targets made
	rm -rf .venv .venv-* .cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
