# Every target makes what it needs: on a fresh machine with Python 3.11, make and git,
# `make demo` and `make test` are all there is to type.

.DELETE_ON_ERROR:
.NOTPARALLEL: # pip does not like company in one environment
.PHONY: help demo test test-slow test-all fuzz lint check bench docs format clean

# python3.11 is what constraints.txt was made for; any python3 that is newer may do.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
JOBS ?= 2
# More arguments for pytest, as in: make test ARGS='-k gather -x'
ARGS ?=

RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --disable-pip-version-check -qq --constraint constraints.txt
PYTEST := $(RUN) pytest --numprocesses=$(JOBS) --dist=worksteal

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.test ## save a model with FSDP2 on four ranks, merge it, compare what comes out
	$(RUN) examples.demo

test: $(VENV)/.test ## the tests, but for the slow ones
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.test ## the slow ones
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow ## all tests

fuzz: $(VENV)/.fuzz ## the readers on changed files for ten minutes; what is found is kept in fuzz-findings
	$(RUN) tests.fuzz $(ARGS)

lint: $(VENV)/.dev ## format, lint, types, floors; changes nothing
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports --no-logo

check: lint test ## lint, then test: what a change has to pass

format: $(VENV)/.dev ## lay the code out, and fix what ruff can fix
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: $(VENV)/.test ## the figures of docs/benchmarks.md, measured on this machine
	$(RUN) benches $(ARGS)

docs: $(VENV)/.docs ## the documentation, in docs/_build/html; a warning is an error
	$(RUN) sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo docs/_build/html/index.html

clean: ## everything that make made
	rm -rf $(VENV) fuzz-findings docs/_build build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find lazymerge tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# A virtual environment is made once, and installed into again when one of these two files changes.
# torch comes first and alone, so that nothing else can choose another build of it. Without build
# isolation, what builds this package is pinned too.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) hatchling editables
	@touch $@

$(VENV)/.fuzz: $(VENV)/.test
	$(RUN) pip install --disable-pip-version-check -qq atheris==3.0.0 || echo 'no atheris here: by chance, then'
	@touch $@

$(VENV)/.test $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@
