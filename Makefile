# Everything runs in .venv, which is made on first use. Override PYTHON to choose the interpreter (3.11 or later),
# PIP_FLAGS for pip (an index with CPU builds of torch, for example), ARGS for pytest or for the recipe, JOBS for how many
# parts of the suite run at once (0: in one process).
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=
JOBS ?= 2
PURE := $(wildcard $(patsubst %,lightning_afd/%,errors.py placement.py expert_map.py packing.py nics.py timeline.py waits.py regime.py \
	recording schedule cost backlog.py lanes.py load.py simulate.py baselines allocate tune.py report \
	$(addprefix bench/,conditions.py names.py ratios.py result.py settings.py)))

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

bin := $(VENV)/bin
stamp := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv train test soak bench docs numbers checks lint format build clean

help:  ## show this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /make \1\t/' | expand -t 14

venv: $(stamp)  ## create .venv with the exact versions of constraints.txt

$(stamp): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	$(bin)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

train: $(stamp)  ## pre-train the small default model: make train ARGS='trainer.max_steps=50'
	$(bin)/lightning-afd pretrain $(ARGS)

test: $(stamp)  ## run the whole test suite, warnings are errors: make test ARGS='-k pool'
	$(bin)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

soak: $(stamp)  ## end and resume a job again and again, then compare it with a quiet one: make soak ARGS='--rounds 4'
	$(bin)/python tests/soak.py $(ARGS)

bench: $(stamp)  ## strategies side by side in a few minutes (root: shaped links): make bench ARGS='repetitions=3'
	$(bin)/lightning-afd bench bench=short $(ARGS)

docs: $(stamp)  ## write docs/reference.md and the pictures of docs/method.md again
	$(bin)/python docs/make_reference.py
	$(bin)/python docs/draw_method.py

numbers: $(stamp)  ## the whole matrix of the benchmark (an hour or two, root), written into docs/benchmarks.md
	$(bin)/lightning-afd bench bench=full docs=docs/benchmarks.md $(ARGS)

checks: lint test  ## all that CI runs: format, lint, types, tests

lint: $(stamp)  ## ruff format, ruff check, mypy --strict on the half without torch
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy --strict $(PURE)

format: $(stamp)  ## format the code and apply safe fixes
	$(bin)/ruff check --fix-only .
	$(bin)/ruff format .

build: $(stamp)  ## build sdist and wheel into dist/
	$(bin)/python -m build --no-isolation

clean:  ## remove what builds and tests left behind; runs (outputs/, multirun/) and .venv stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
