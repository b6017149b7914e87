# kvslim: `make demo` and `make test` set everything up on a fresh machine.
#
# Variables:
#   PYTHON    interpreter for the virtual environments; the first 3.11 or 3.12 found by default
#   PIP_ARGS  extra arguments of `pip install`, e.g. an index with CPU-only builds of torch
#   ARGS      extra arguments of the command that a target runs, e.g. make demo ARGS="--help"

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Some shims exist but do not run, so each candidate has to prove its version.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
ARGS ?=

VENV := .venv
NEWEST := .venv-newest
BIN := $(VENV)/bin

.PHONY: help demo test fast lint format test-newest clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## compress the KV cache of a small real model and show bytes and quality
	$(BIN)/kvslim demo $(ARGS)

test: $(VENV)/.installed  ## all tests, the slow ones included
	$(BIN)/python -m pytest -n auto $(ARGS)

fast: $(VENV)/.installed  ## the tests that need no real model
	$(BIN)/python -m pytest -n auto -m "not slow" $(ARGS)

lint: $(VENV)/.installed  ## ruff, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed  ## rewrite the code as ruff likes it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-newest: $(NEWEST)/.installed  ## the fast tests with the newest transformers that pyproject.toml allows
	$(NEWEST)/bin/python -m pytest -n auto -m "not slow" $(ARGS)

clean:  ## remove the virtual environments and what the tools left behind
	rm -rf $(VENV) $(NEWEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Done again only when pyproject.toml or constraints.txt changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvslim needs Python 3.11 or 3.12; none found. Set PYTHON=/path/to/python3.11"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

# Only torch and the triton that belongs to it stay pinned here: another torch would be another download of its own.
$(NEWEST)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvslim needs Python 3.11 or 3.12; none found. Set PYTHON=/path/to/python3.11"; exit 1; }
	$(NEWEST)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(NEWEST)
	grep -E '^(torch|triton)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install $(PIP_ARGS) -c $(NEWEST)/constraints.txt --upgrade --upgrade-strategy eager -e '.[dev]'
	touch $@
