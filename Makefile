# `make demo` runs the main job on a small data set of its own; `make check` is what CI runs; `make soak` kills every job a
# hundred times and watches the memory of a long run (half an hour; SOAK='--out FILE' keeps the table). These make .venv
# first. `make gpu` runs and measures what needs a GPU, and writes a report (scripts/gpu.sh). `make lines` counts the
# lines of every folder, beside its aim.

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

# The most lines that each folder should have.
AIMS := asking:900 asynchronous:950 backbone:300 baselines:300 batching:2500 bench:500 cli:1700 data:900 dynamic:1500 \
	evaluation:2300 execution_engine:1800 models:700 preprocess:1800 program_generator:300 runtime:600 synth:2300 \
	training:1200

lines:  # of every folder: a change that adds capability and removes lines is the best kind
	@count() { find "$$@" -name '*.py' -o -name '*.js' -o -name '*.css' -o -name '*.sh' | xargs cat | wc -l; }; \
	row() { printf '%-24s %6d of %6d\n' "$$1" "$$2" "$$3"; }; \
	for each in $(AIMS); do row iep/$${each%:*} "$$(count iep/$${each%:*})" $${each#*:}; done; \
	row 'iep/*.py' "$$(cat iep/*.py | wc -l)" 950; \
	row 'iep, all of it' "$$(count iep)" 21500; \
	row benchmarks "$$(count benchmarks)" 2600; \
	row tests "$$(count tests)" 15500

soak: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python scripts/soak.py $(SOAK)

.venv/installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "iep needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
