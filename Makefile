# `make demo` runs the main job on generated data of CLEVR's difficulty; `make check` is what CI runs; `make soak` kills every job a
# hundred times and watches the memory of a long run (half an hour; SOAK='--out FILE' keeps the table). These make .venv
# first. `make gpu` runs and measures what needs a GPU, and writes a report (scripts/gpu.sh). `make lines` counts the
# tokens and lines of every folder.

PYTHON ?= python3
BIN := .venv/bin
DEMO ?= runs/demo
GPU ?= runs/gpu

.PHONY: demo check lint types format test gpu lines soak clean

demo: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh $(DEMO)

check: lint types test

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: .venv/installed
	$(BIN)/python -m pytest

gpu: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/gpu.sh $(GPU)

lines:  # a change that adds capability and removes tokens is the best kind
	@$(PYTHON) scripts/count_tokens.py iep benchmarks tests

soak: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python scripts/soak.py $(SOAK)

.venv/installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "iep needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
