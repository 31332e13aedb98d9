# Every target makes .venv first, with what it needs: nothing but Python >= 3.11 and make is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: kvd and what it needs (BASE), and what the tests and tools need besides, torch among it (DEV). A stamp is
# written when an installation is complete: one that was interrupted is made again.
BASE := $(VENV)/.kvd-base
DEV := $(VENV)/.kvd-dev
INTEGRATIONS := $(VENV)/.kvd-integrations
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests often wait for a process or a timeout: with four workers two cores were idle for a third of the time.
WORKERS ?= 6
CLUSTER_TESTS := tests/cli tests/client tests/compat tests/conformance tests/docs tests/faults tests/fuzz tests/jax tests/node \
	tests/observe tests/parallel tests/torch tests/transport $(wildcard tests/test_*.py)

# Tests start hundreds of processes: each of them would compile all of kvd's modules anew, for half of its start-up time.
unexport PYTHONDONTWRITEBYTECODE

# They run side by side: with two threads each, NumPy's and torch's would wait for each other in loops.
test quick test-insecure test-integrations soak: export OMP_NUM_THREADS = 1

.PHONY: demo test quick test-insecure test-integrations lint docs bench soak clean

$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvd needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -e .
	touch $(BASE)

$(DEV): $(BASE)
	$(PIP) install --quiet -e '.[dev]'
	touch $(DEV)

$(INTEGRATIONS): $(DEV)
	$(PIP) install --quiet -e '.[integrations]'
	touch $(INTEGRATIONS)

demo: $(BASE)
	$(BIN)/kvd demo

# Two runs of pytest and one of coverage, each after the others whatever came of them. What failed stands at the end.
test: $(DEV)
	$(BIN)/python -m tests.phases --workers $(WORKERS)

# Before each commit: formatting, lint, layers, types, and the tests that find most for their time.
quick: $(DEV)
	$(BIN)/python -m tests.phases --quick

# What makes clusters, without keys; tests that are about keys have them.
test-insecure: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --kvd-insecure $(CLUSTER_TESTS)

lint: $(DEV) docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=cli $(BIN)/lint-imports

# The site of the documentation, with the API reference; a broken link, docstring or reference is an error.
docs: $(DEV)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site

# Recipes of the documentation for frameworks that are large to install.
test-integrations: $(INTEGRATIONS)
	$(BIN)/python -m pytest -m integrations tests/integrations

soak: $(DEV)
	$(BIN)/python -m pytest -m soak --timeout 1800

bench: $(DEV)
	$(BIN)/python -m benchmarks.compare

clean:
	rm -rf $(VENV) build dist .coverage .mypy_cache .ruff_cache .import_linter_cache
