# Every target sets up what it needs on a fresh machine: .venv, pinned dependencies and, where needed, servers.
# Repeated runs skip what exists.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-pythons check bench bench-peers endurance mutants docs fmt dist pins clean

BIN   := .venv/bin
STAMP := .venv/.holdfast-stamp
DEMO_STAMP := .venv-demo/.holdfast-stamp
# Hundreds of Python processes start in a test run: they share compiled modules.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest
# Each test has its own store or namespace, so any process may run any of them. Most wait at times, so there are more
# processes than cores; fewer for tests that kill and stop processes against the clock of a lease, or that start a Kafka
# and a RabbitMQ per process. Searches take minutes each, are not traced, and run concurrently with all others at a lower
# priority, but not so low that another program could starve them.
PYTEST_WORKERS ?= 5
FAULT_WORKERS  ?= 3
SEARCH_WORKERS ?= 2
SEARCH_LOG := .pytest-search.log
# Only these files are loaded for searches.
SEARCHES = $(sort $(shell grep -rl --include='test_*.py' 'pytest\.mark\.search' tests))
SOURCES := src tests tools examples benchmarks

help: ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(STAMP): pyproject.toml requirements/dev.txt tools/bootstrap.sh
	@tools/bootstrap.sh dev .venv
	@touch $@

$(DEMO_STAMP): requirements/base.txt tools/bootstrap.sh
	@tools/bootstrap.sh base .venv-demo
	@touch $@

demo: $(DEMO_STAMP) ## a few hundred jobs on one SQLite file, with a worker that is killed; no server needed
	@PYTHONPATH=$(CURDIR)/src .venv-demo/bin/python -m holdfast demo

test: $(STAMP) ## the whole test suite on real servers, with coverage (at least 90 %)
	@$(BIN)/python tools/servers.py ensure
	@nice -n 5 $(PYTEST) -n $(SEARCH_WORKERS) --dist load --maxschedchunk 1 --timeout 900 -m search $(SEARCHES) $(ARGS) > $(SEARCH_LOG) 2>&1 & search=$$!; \
	trap 'kill $$search 2>/dev/null' EXIT; set -x; \
	$(PYTEST) -n $(PYTEST_WORKERS) --dist worksteal -m 'not faults and not brokers and not search' --cov --cov-report= --cov-fail-under=0 $(ARGS) && \
	$(PYTEST) -n $(FAULT_WORKERS) --dist worksteal -m '(faults or brokers) and not search' --cov --cov-append --cov-report=term $(ARGS) || exit 1; \
	wait $$search; searches=$$?; tail -n 100 $(SEARCH_LOG); exit $$searches
	@$(BIN)/python -m tools.pythons test

test-pythons: $(STAMP) ## unit and SQLite contract tests from the wheel on Python 3.12 and 3.13, where installed
	@$(BIN)/python -m tools.pythons test

check: $(STAMP) ## formatting, lint, types, import directions, imports of the base, names, words, docs, spec coverage
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin src
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_base_imports
	$(BIN)/python -m tools.check_names
	$(BIN)/python -m tools.check_words
	$(BIN)/python -m tools.gen_docs --check
	$(BIN)/python -m tools.check_spec_coverage

bench: $(STAMP) ## speed compared with a bare Redis loop and, with a ledger, other task systems; table, JSON and plot
	@$(BIN)/python tools/servers.py ensure
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(STAMP) ## comparison with thirteen other task systems, including kill -9; about 25 minutes
	@$(BIN)/python tools/servers.py ensure
	$(BIN)/python -m benchmarks --only rivals $(ARGS)

endurance: $(STAMP) ## half an hour at half of the top rate: detect growth
	@$(BIN)/python tools/servers.py ensure
	$(BIN)/python -m benchmarks.endurance $(ARGS)

mutants: $(STAMP) ## remove each safety check, one at a time; a test must fail
	@$(BIN)/python tools/servers.py ensure
	$(BIN)/python -m tools.mutants $(ARGS)

docs: $(STAMP) ## regenerate the generated parts of docs/
	$(BIN)/python -m tools.gen_docs

fmt: $(STAMP) ## format, and apply automatic fixes
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

dist: $(STAMP) ## sdist, wheel, its bill of materials (CycloneDX) and checksums, in dist/
	@$(BIN)/python -m tools.dist

pins: ## regenerate requirements/ from pyproject.toml, with hashes; ARGS=--upgrade for newer versions
	@tools/pins.sh $(ARGS)

clean: ## remove everything that was built or downloaded
	rm -rf .venv .venv-demo .pythons .servers build dist .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
