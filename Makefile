# Every target makes .venv first: nothing but Python >= 3.11 and make is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvd-installed
# Tests often wait for a process or a timeout: with three workers two cores were idle for half of the time.
WORKERS ?= 4
CORE_TESTS := tests/core tests/protocol
CLUSTER_TESTS := tests/cli tests/client tests/conformance tests/docs tests/faults tests/fuzz tests/node tests/observe \
	tests/parallel tests/transport $(wildcard tests/test_*.py)
# What every operation returns: it is the same without the lanes, which `test-without-lanes` shows for all clusters.
LANE_TESTS := tests/client tests/conformance

# Tests start hundreds of processes: each of them would compile all of kvd's modules anew, for half of its start-up time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-insecure test-without-lanes lint reference bench soak clean

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvd needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/kvd demo

# The state machines and the protocol are covered by tests of their own; measuring it would double the time of the rest.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov=kvd/core --cov=kvd/protocol --cov-report= $(CORE_TESTS)
	$(BIN)/coverage report --fail-under=95
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=40 $(CORE_TESTS:%=--ignore=%)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --kvd-lanes off $(LANE_TESTS)

# What makes clusters, without keys; tests that are about keys have them.
test-insecure: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --kvd-insecure $(CLUSTER_TESTS)

test-without-lanes: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --kvd-lanes off $(CLUSTER_TESTS)

lint: $(STAMP) reference
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=cli $(BIN)/lint-imports

# The pages of the API, from the docstrings; a broken docstring or reference is an error.
reference: $(STAMP)
	$(BIN)/python -m docs.reference.build build/reference

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak --timeout 1800

bench: $(STAMP)
	$(BIN)/python -m benchmarks.compare

clean:
	rm -rf $(VENV) build dist .coverage .mypy_cache .ruff_cache .import_linter_cache
