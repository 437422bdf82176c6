# Every target installs what it needs. `make demo` and `make test` need python3 (3.11 or later, with venv), make, and a network.
#
#   make demo       train the implicit model and its explicit twin on S3, side by side; draw the comparison;
#                   five to fifteen minutes on two idle cores, up to an hour on busy ones
#   make puzzle     train a model that solves Sudoku of order 6, in ten minutes on two idle cores; solve boards with it
#   make play       open the demo's models in a browser, after make demo
#   make test       run ruff, mypy and the tests; eight to twenty minutes on two idle cores
#   make test-all   the same, including the tests marked slow
#   make lint       run ruff only; make types: run mypy only
#   make test-gpu   run the tests that need a CUDA device; write their outcomes to benchmarks/results/gpu_tests.json
#   make docs       build the documentation into build/site
#   make dist       build wheels and source distributions of the library and the plugins into dist/, and check them
#   make format     format the code with ruff
#   make clean      delete the virtual environment, build outputs and caches
#
# PYTHON=python3.12 chooses the interpreter, VENV=dir the virtual environment, JOBS=4 the test processes.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV ?= .venv
JOBS ?= 2
MARKS ?= not slow and not gpu
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check
PLUGINS := $(wildcard plugins/*/pyproject.toml)
PLUGIN_FOLDERS := $(PLUGINS:/pyproject.toml=)

# Processes run in parallel, so each uses one thread.
export OMP_NUM_THREADS ?= 1
# Packages on PYTHONPATH would hide the pinned ones.
unexport PYTHONPATH PYTHONHOME

.PHONY: help demo play puzzle test test-all tests test-gpu lint types docs dist format setup setup-dev clean

help:
	@sed -n 's/^#   \(make .*\|   .*\)/\1/p' Makefile

demo: setup
	@$(BIN)/python benchmarks/demo.py

puzzle: setup
	@$(BIN)/python -m trainer --spec sudoku_6x6 --output runs/puzzle --device cpu training.threads=2
	@$(BIN)/python -m trainer.experiments puzzles --checkpoint runs/puzzle --output runs/puzzle-solved --device cpu

play: $(VENV)/.installed-serve
	@$(BIN)/python benchmarks/play.py

# mypy uses one core, so it runs beside the tests.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types tests

test-all: lint
	@$(MAKE) --no-print-directory --jobs=2 types tests MARKS="not gpu"

tests: setup-dev
	@$(BIN)/python -m pytest -n $(JOBS) -m "$(MARKS)"

test-gpu: setup-dev
	@$(BIN)/python benchmarks/gpu_tests.py --processes $(JOBS)

lint: setup-dev
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "some files are not formatted; run: make format" >&2; exit 1; }

types: setup-dev
	@$(BIN)/python -m mypy

# Warnings are errors. NO_MKDOCS_2_WARNING silences a notice of the theme's about other products.
docs: setup-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

# setuptools keeps files of earlier builds in build/lib: wheels are built from the source distributions.
dist: setup-dev
	@rm -rf dist
	@for folder in . $(PLUGIN_FOLDERS); do $(BIN)/python -m build --no-isolation --outdir dist "$$folder" > /dev/null; done
	@$(BIN)/python -m twine check --strict dist/*

format: setup-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

clean:
	rm -rf $(VENV) build dist *.egg-info plugins/*/build plugins/*/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Stamp files: a target installs again only when its requirements have changed.

$(VENV)/.created:
	@tools/create_venv.sh $(VENV) $(PYTHON)
	@touch $@

# The constraints pin torch and all other packages. setuptools is installed first, so that the pinned version, not
# the newest, builds the project.
$(VENV)/.installed: $(VENV)/.created constraints.txt pyproject.toml
	@echo "Installing the pinned dependencies into $(VENV) (a minute or two the first time) …"
	@$(PIP_INSTALL) -c constraints.txt setuptools
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[train]'
	@touch $@

$(VENV)/.installed-serve: $(VENV)/.installed
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[serve]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(PLUGINS)
	@echo "Installing the development tools and the plugins …"
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[dev]'
	@for folder in $(PLUGIN_FOLDERS); do $(PIP_INSTALL) --no-deps --no-build-isolation -e "$$folder"; done
	@touch $@
