# make demo   train a small MoE with expert parallelism on two CPU processes, from nothing
# make demo-dpo, make demo-reward   the same for preferences: each ends with margin and accuracy on held-out pairs
# make demo-vl              a small Qwen3-VL-MoE learns to name drawn shapes: pictures with answers before and after
# make quick  between edits: lint, types, import contracts, unit tests, one sharded run against one process
# make test   the same and every other test that needs no accelerator
# make lint   lint, types and import contracts only
# make families every model family against plain Transformers; writes docs/models.md (make test: the small sweep);
#               in parts, then merged: see .venv/bin/python -m tests.families --help
# make verify ten families and every fault through hf-fsdpturbo verify: exact, and red where it must be
# make peers  TRL's or Transformers' own trainer tests with our classes: PEERS=folder of a checkout, not copied here
# make fuzz   5,000 bad inputs from a seed, on two ranks and in one process (make test: 160)
# make chaos  100 runs killed, 100 signalled, 100 started twice, at random moments: CHAOS="--each 10" (make test: 10)
# make matrix the five published layouts on 16 and 8 CPU processes, 100 steps each (make test: 6)
#
# Each target makes .venv and installs into it when needed; an existing .venv is used as it is.
#   PYTHON=python3.12      the interpreter that makes .venv (3.11 or newer)
#   CONSTRAINTS=           install without pinned versions (another torch, say)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONSTRAINTS ?= requirements/constraints-cpu.txt

BIN := .venv/bin
STAMP := .venv/.installed

OUT := outputs/demo
LAUNCH := $(BIN)/accelerate launch --config_file accelerate_configs/cpu_ep2.yaml

# One thread a rank: two ranks on two cores, and the many ranks of the tests, would only fight over more.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install lint quick test demo demo-vl matrix families fuzz chaos peers verify clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(MAKEFILE_LIST)

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }; \
	  $(PYTHON) -m venv .venv; }
	@echo "Installing into .venv (a minute or two, more when pip has to download) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# An installed Triton (CUDA wheels of torch bring one) stays as it is.
.venv/.triton: requirements/triton-interpreter.txt $(STAMP)
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

quick: $(STAMP)
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory lint && $(BIN)/python -m pytest -q tests/unit tests/distributed/test_quick.py; \
	status=$$?; echo "make quick: $$(($$(date +%s) - start)) s"; exit $$status

test: lint .venv/.triton
	@start=$$(date +%s); $(BIN)/python -m pytest tests; \
	status=$$?; echo "The tests took $$(($$(date +%s) - start)) s."; exit $$status

# Everything the demo needs is made on the spot, so nothing may ask the Hub.
demo: export HF_HUB_OFFLINE = 1
demo: export HF_DATASETS_DISABLE_PROGRESS_BARS = 1
demo: $(STAMP)
	rm -rf $(OUT)
	$(BIN)/python demo/make_inputs.py $(OUT)
	$(LAUNCH) recipes/sft.py --config recipes/demo_sft.yaml
	@echo "Comparing the saved model with the trainer ..."
	$(LAUNCH) demo/trainer_logits.py $(OUT)
	$(BIN)/python demo/report.py $(OUT)

verify: $(STAMP)
	$(BIN)/python -m tests.support.verify_all

matrix: $(STAMP)
	MATRIX_STEPS=100 $(BIN)/python -m pytest -s tests/distributed/test_published_matrix.py

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(CHAOS)

families: $(STAMP)
	$(BIN)/python -m tests.families --markdown docs/models.md

peers: $(STAMP)
	$(BIN)/python -m tests.peers $(PEERS)

demo-dpo demo-reward: export HF_HUB_OFFLINE = 1
demo-dpo demo-reward: export HF_DATASETS_DISABLE_PROGRESS_BARS = 1
demo-dpo demo-reward: demo-%: $(STAMP)
	rm -rf outputs/demo_$*
	$(BIN)/python demo/make_pairs.py outputs/demo_$*
	$(LAUNCH) recipes/$*.py --config recipes/demo_$*.yaml
	$(BIN)/python demo/report_pairs.py $* outputs/demo_$*

demo-vl: export HF_HUB_OFFLINE = 1
demo-vl: export HF_DATASETS_DISABLE_PROGRESS_BARS = 1
demo-vl: $(STAMP)
	rm -rf outputs/demo_vl
	$(BIN)/python demo/make_pictures.py outputs/demo_vl
	$(LAUNCH) demo/train_pictures.py outputs/demo_vl
	$(BIN)/python demo/report_pictures.py outputs/demo_vl

clean:
	rm -rf outputs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
