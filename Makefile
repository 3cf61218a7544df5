# `make demo` and `make test` work on a fresh checkout. They need make and Python 3.11 or newer, called python3; give
# another with PYTHON=python3.12. Everything is installed into .venv, from constraints.txt.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin

# One thread a process: test workers and stages run side by side, and more threads only slow each other down.
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test check recipe bench clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' Makefile | expand -t 10

venv: .venv/.installed  ## set up .venv, or bring it up to date

.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is not installed; choose another with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$($(PYTHON) --version) is too old: opdctl needs 3.11 or newer; choose another with PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: venv  ## the whole recipe, from an untrained model to the fusion table: minutes on two cores
	$(BIN)/opdctl run pipelines/kimi_k3.yaml

test: venv  ## the tests that take no learning and no other trainer
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations=10 --durations-min=5 -m "not recipe and not peer and not verl"

check: venv  ## format, lint, types, layers, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict opdctl
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

recipe: venv  ## does the recipe learn what it should? the whole of it over seeds 0, 1, 2
	$(BIN)/python -m pytest -m recipe

bench: venv  ## measurements: speed and memory, see benchmarks/
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:  ## remove .venv and caches; runs/ and the MLflow store stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist build
