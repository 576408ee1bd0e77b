# make demo   train a small MoE with expert parallelism on two CPU processes, from nothing
# make test   lint + types + import contracts + every test that needs no accelerator
# make lint   the first three only
#
# Each target makes .venv and installs into it when needed; an existing .venv is used as it is.
#   PYTHON=python3.12      the interpreter that makes .venv (3.11 or newer)
#   CONSTRAINTS=           install without pinned versions (another torch, say)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONSTRAINTS ?= requirements/constraints-cpu.txt

BIN := .venv/bin
STAMP := .venv/.installed

# Two ranks share two cores: more threads a rank only fight. Nothing here may look for a model on the network.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install lint test clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(MAKEFILE_LIST)

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }; \
	  $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest tests

clean:
	rm -rf outputs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
