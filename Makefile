# Two commands to know: `make run` and `make test`. Needs Python 3.11 or later with venv, and nothing else.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help run check test test-browser shots fuzz demo worker manage measure install install-test gallery ui types lock lint trace hooks clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
NAME ?=
ARGS ?=
SECTION ?=
# Most of what the tests wait for is a lease or a copy, not the processor: three at a time on two cores.
TEST_PROCESSES ?= 3

help:
	@echo "make run              everything on this machine, until Ctrl-C"
	@echo "make test             lint, types, import contracts and all tests"
	@echo "make test-browser     the tests in Chromium alone; ARGS='-k sign_in' for some of them"
	@echo "make trace            which tests prove which rule; SECTION=\"1B http-1\" for a part; fails on a gap"
	@echo "make fuzz             generated requests as admin and as a node, compared with the API document"
	@echo "make demo             runs the example request and checks the answer; ARGS=--fresh in a new cluster"
	@echo "make worker NAME=two  one more worker for the running cluster"
	@echo "make manage ARGS='nodes list'   a management command for the running cluster"
	@echo "make measure          every time limit as figure, limit, held or not"
	@echo "make shots            drives the product in Chromium and writes the pictures of docs/pictures"
	@echo "make ui               builds the browser's side; nothing to do if its sources are unchanged"
	@echo "make types            writes the browser's types anew from the API's document"
	@echo "make lock             compiles requirements/*.in anew"
	@echo "make hooks            runs the quick checks before each commit"
	@echo "make clean            removes what make has built; data stays"

# The first run installs for a minute or two; "ready in" counts from here.
run: export CLUSTER_MAKE_BEGAN := $(shell date +%s)
run: gallery ui
	@exec $(BIN)/python -m localai_cluster.embedded.run

demo: gallery ui
	@exec $(BIN)/python -m localai_cluster.embedded.demo $(ARGS)

worker: install
	@exec $(BIN)/python -m localai_cluster.embedded.worker "$(NAME)"

manage: install
	@exec $(BIN)/python -m localai_cluster.embedded.manage "$(ARGS)"

# The second part needs a browser; HEAP_MINUTES shortens the ten minutes of its memory figure.
measure: install-test gallery ui
	@$(BIN)/python -m localai_cluster.embedded.measure; first=$$?; \
		$(BIN)/python -m tests.browser.measure && exit $$first

install:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh requirements/install.sh run

install-test:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh requirements/install.sh run test

gallery: install
	@$(BIN)/python examples/gallery/build.py

ui: install
	@$(BIN)/python -m localai_cluster.embedded.ui build

types: install
	@$(BIN)/python -m localai_cluster.embedded.ui types

lint: install-test
	@$(BIN)/python -m tests.checks.steps lint

check: install-test
	@$(BIN)/python -m tests.checks.steps check

# Two runs, each with its own summary: the browser's, then all the others, also if the first one fails.
test: lint gallery ui
	@$(BIN)/python -m tests.browser.install
	@$(BIN)/python -m pytest tests/browser -n0; first=$$?; \
		$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile && exit $$first

test-browser: install-test gallery ui
	@$(BIN)/python -m tests.browser.install
	@$(BIN)/python -m pytest tests/browser -n0 $(ARGS)

shots: install-test gallery ui
	@$(BIN)/python -m tests.browser.install
	@exec $(BIN)/python -m tests.browser.shots

trace: install-test
	@exec $(BIN)/python -m tests.checks.trace $(SECTION)

fuzz: install-test gallery
	@exec $(BIN)/python -m tests.fuzz

hooks:
	git config core.hooksPath .githooks

lock:
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q -r requirements/lock.in; }
	@for name in run test minilm echo; do \
		no_deps=; case $$name in minilm|echo) no_deps=--no-deps;; esac; \
		$(BIN)/uv pip compile -q $$no_deps --python-version 3.11 --generate-hashes --no-header --no-annotate \
			requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done

clean:
	rm -rf build dist static/dist static/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)
