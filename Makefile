# Every target makes .venv first when it is missing or out of date (scripts/bootstrap.py), so `make test` in a fresh
# clone is all there is to set up.
#
#   PYTHON   the interpreter .venv is made with         make test PYTHON=python3.12
#   ARGS     passed on to the demo, pytest or benchmark  make test ARGS="-k metagrad --no-cov"
#   WORKERS  pytest processes                            make test WORKERS=8

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

# Tests share the cores as processes; one thread each keeps them from fighting and the results reproducible.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
BIN = .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv run test lint format bench slurm clean

help: ## list the targets
	@awk 'BEGIN {FS = ":[^#]*## "} /^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

venv: ## make or renew .venv; the other targets do it by themselves
	@$(PYTHON) scripts/bootstrap.py

run: ## prune and train a small network, and show what it bought
	@$(PYTHON) scripts/bootstrap.py lab
	@$(BIN)/python -m prospr.lab.demo $(ARGS)

lint: venv ## ruff check, ruff format --check, ty
	@echo "== ruff check"; $(BIN)/ruff check
	@echo "== ruff format --check"; $(BIN)/ruff format --check
	@echo "== ty check"; $(BIN)/ty check

test: lint ## lint, then every test and docstring example, with coverage
	@echo "== pytest"; $(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --cov $(ARGS)
	@echo "make test: ruff, ty and pytest passed"

format: venv ## let ruff fix and format the code
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

bench: venv ## time and memory of the exact meta-gradient
	@$(BIN)/python benchmarks/metagrad.py $(ARGS)

slurm: ## install Slurm by apt, for the tests of sweeps on it; they are skipped without
	@sh scripts/install_slurm.sh

clean: ## remove .venv, caches and build output; runs/ stays
	@rm -rf .venv .venv.lock .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* coverage.xml htmlcov dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
