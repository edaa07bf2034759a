# Every target does its own set-up: the first one makes an environment outside the clone (scripts/bootstrap.py), later ones reuse it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

RUN := scripts/run.sh
PYTEST := $(RUN) python -m pytest

.PHONY: help setup demo check test test-parallel test-slow test-latest gpu lint format clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## Make the environment, or find it already made, and print its path
	@$(RUN) python -c 'import sys; print(sys.prefix)'

demo: ## Train a tiny family on this machine, cut its members out, verify and plot them (five minutes)
	@$(RUN) launchers/demo.sh

# What trains, draws, spawns or compares with transformers takes longer than an edit may wait; `make test` runs it.
LONGER := train parallel export checkpoint docs report cli benchmarks testing test_smoke.py test_cost_transformers.py
LONGER += elastic/test_random_families.py elastic/test_measured.py elastic/test_bf16.py

check: lint ## For each edit, under 2 minutes: lint, types, the fast tests
	@$(PYTEST) -q -x -m "not dist and not slow and not gpu" $(LONGER:%=--ignore=tests/%)

LEFT_OUT := slow or gpu

test: export OMP_NUM_THREADS := 1
test: export TORCHDYNAMO_DISABLE := 1
test: ## All tests but the slow ones
	@$(PYTEST) -m "not ($(LEFT_OUT))" --durations=20 --durations-min=5

test-parallel: export OMP_NUM_THREADS := 1
test-parallel: export TORCHDYNAMO_DISABLE := 1
test-parallel: export ALL_LAYOUTS := 1
test-parallel: ## A training step on every layout, model and mode (about 10 minutes; CI runs a half that changes daily)
	@$(PYTEST) tests/parallel -m "not slow and not gpu"

test-slow: export OMP_NUM_THREADS := 1
test-slow: export TORCHDYNAMO_DISABLE := 1
test-slow: ## The slow tests
	@$(PYTEST) -m "slow and not gpu"

test-latest: ## The tests of `make test` on Python 3.12 and the latest megatron-core, without those that need one of the two
	@python=$$(scripts/find_python.sh 3.12) || { echo "error: no working Python 3.12, tried python3.12 and pyenv; install one" >&2; exit 2; }; \
	PYTHON=$$python $(MAKE) --no-print-directory test LEFT_OUT="slow or gpu or one_release"

gpu: ## For whoever has a GPU, three minutes: compare it with the CPU, masked with sliced, and time both (docs/gpu.md)
	@$(RUN) python scripts/gpu_check.py

SCRIPTS := .ci/run $(wildcard bin/* scripts/*.sh launchers/*.sh docker/*.sh slurm/*.sh)

lint: ## ruff, codespell, pyright, shellcheck and hadolint
	@$(RUN) ruff check
	@$(RUN) ruff format --check || { echo "error: not formatted; run: make format" >&2; exit 1; }
	@$(RUN) codespell
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) pyright
	@$(RUN) shellcheck --external-sources $(SCRIPTS)
	@$(RUN) hadolint docker/Dockerfile

format: ## Sort imports and format the code in place
	@$(RUN) ruff check --quiet --select I --fix
	@$(RUN) ruff format

clean: ## Remove what builds, tests and tools left in the clone; runs/ and the environment stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@echo "kept: runs/ and $${MEGATRON_ELASTIC_CACHE:-$$HOME/.cache/megatron-elastic}"
