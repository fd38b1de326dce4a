# make demo | test | test-slow | lint | bench | results
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[graph,images,tensorboard,dev]'
	touch $@

.PHONY: demo test test-slow lint bench results

demo: $(VENV)/installed
	$(BIN)/profcil study demo --out runs/demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/profcil bench

results: $(VENV)/installed
	$(BIN)/profcil study core --out runs/core
