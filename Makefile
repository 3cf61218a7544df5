# `make demo` and `make test` work on a fresh checkout. They need make and Python 3.11 or newer, called python3; give
# another with PYTHON=python3.12. Everything is installed into .venv, from constraints.txt.
PYTHON ?= python3
VERL_PYTHON ?= python3.11
# Of `make test`, one more than two cores: a test often waits for a process that starts.
JOBS ?= 3
BIN := .venv/bin
VERL := .venv-verl

# One thread a process: test workers and stages run side by side, and more threads only slow each other down.
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test check recipe recipes drills real bench verl-env test-verl clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 10

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
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations=10 --durations-min=5 -m "not recipe and not peer and not verl and not drills"

check: venv  ## format, lint, types, layers, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict opdctl
	$(BIN)/lint-imports --no-cache  # which keeps a module that became a package
	$(BIN)/python scripts/check_sizes.py

recipe: venv  ## does kimi_k3 learn what it should, over seeds 0, 1, 2? are guards silent in every recipe? 20 minutes
	$(BIN)/python -m pytest -m recipe

recipes: venv  ## every packaged recipe at laptop scale, written down in docs/recipes.md: an hour of one core
	$(BIN)/python -m scripts.recipes

drills: venv  ## 200 failure drills, written down in docs/drills.md: half an hour on two cores; some: ONLY="3 17"
	PYTHONPATH=tests $(BIN)/python -m drills $(ONLY)

# verl's trainers and vLLM live in an environment of their own: they pin versions that opdctl does not want. This one is
# for a machine without a GPU; on GPUs see runbooks/verl.md.
verl-env: $(VERL)/.installed  ## verl and vLLM's CPU build in .venv-verl: x86-64 Linux, Python 3.11, 4 GB

$(VERL)/.installed: requirements-verl.txt
	@command -v $(VERL_PYTHON) > /dev/null || { \
	  echo "$(VERL_PYTHON) is not installed; name a Python 3.11 with VERL_PYTHON=..." >&2; exit 1; }
	@test "$$($(VERL_PYTHON) -c 'import sys, platform; print(*sys.version_info[:2], sys.platform, platform.machine())')" \
	  = "3 11 linux x86_64" || { echo "verl-env: the versions are for Python 3.11 on x86-64 Linux" >&2; exit 1; }
	@test -x $(VERL)/bin/python || $(VERL_PYTHON) -m venv $(VERL)
	@$(VERL)/bin/python -m pip install --quiet --no-deps "$$(grep '^torch==' requirements-verl.txt)" || { \
	  echo "verl-env: vLLM's CPU build needs PyTorch's, which pip does not find here: install it into $(VERL) as PyTorch's" >&2; \
	  echo "install page says, in the version of requirements-verl.txt, then run make verl-env again" >&2; exit 1; }
	$(VERL)/bin/python -m pip install --quiet --no-deps --requirement requirements-verl.txt
	@touch $@

# Needs .venv-verl; without it, it says so and passes. The two lines use the same environment from outside and from inside.
test-verl: venv  ## the tests that run real verl and vLLM: minutes
	@if test -e $(VERL)/.installed; then $(MAKE) --no-print-directory really-test-verl; else \
	  echo "test-verl: SKIPPED, nothing of verl and vLLM is tested: there is no $(VERL) (make verl-env)" >&2; fi

.PHONY: really-test-verl
really-test-verl:
	$(VERL)/bin/python -m pytest -c tests/verl_env/pytest.ini tests/verl_env
	OPDCTL_VERL_PYTHON=$(CURDIR)/$(VERL)/bin/python $(BIN)/python -m pytest --durations=10 --durations-min=5 -m verl

# Seeds in SEEDS, "0 1 2" for all that docs/word_problems.md reports; a folder with MAWPS's files in DATA.
SEEDS ?= 0
real: venv  ## SmolLM2-135M on word problems: SFT, two GRPO specialists, distillation, evaluation: 15 minutes a seed
	$(BIN)/python -m scripts.real --seeds $(SEEDS) $(if $(DATA),--data $(DATA))

bench: venv  ## measurements: speed and memory, see benchmarks/
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:  ## remove .venv, .venv-verl and caches; runs/ and the MLflow store stay
	rm -rf .venv .venv-verl .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist build
