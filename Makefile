# Two commands do everything on a fresh machine: `make demo` and `make test`.
#
# PYTHON     the interpreter that .venv is made with (3.11 or newer)
# PIP_ARGS   more arguments for every `pip install`, such as an index that serves CPU builds of torch
# TRITON     the Triton to test with where torch brings none of its own, as its CPU builds do not
# WORKERS    processes that the tests are spread over

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TRITON ?= triton==3.6.0
WORKERS ?= auto
DEMO_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt

# What is installed counts, not what the caller's shell points at.
unexport PYTHONPATH

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test bench notebooks docs lint check format clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## one attention layer of DeepSeek-V3, decoded and held to float64
	$(BIN)/python -m mla demo $(DEMO_ARGS)

test: lint ## every check there is: style, types, import contracts, all tests, coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal --cov

bench: $(VENV)/.demo ## backends and installed peers on the same work; without a GPU the cases are scaled down
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && quick= || quick=--quick; \
		set -x; $(BIN)/python -m mla bench $$quick $(BENCH_ARGS)

notebooks: $(VENV)/.test ## run every notebook from a clean kernel and write its .ipynb again
	$(BIN)/python notebooks/pairing.py

docs: $(VENV)/.docs ## the documentation, in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -n docs build/docs

lint: $(VENV)/.test ## style, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## what to run before a commit: lint, and the tests but those of packaging
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal --ignore tests/package

format: $(VENV)/.test ## rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what the other commands made, .venv too
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
		.ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its pinned version: a plain resolve may take a CUDA build of several GB that is newer.
# The build back end is installed too, so that pip needs no build environment of its own.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"mla needs Python 3.11 or newer; PYTHON=$(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools wheel
	$(INSTALL) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	touch $@

# A CUDA build of torch demands one exact Triton, which constraints.txt cannot know; that one stays.
$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) --no-build-isolation --editable '.[demo,lint,numba,test]'
	$(BIN)/python -c 'import sys, importlib.util as u; sys.exit(sys.platform == "linux" and not u.find_spec("triton"))' \
		|| $(INSTALL) '$(TRITON)'
	touch $@
