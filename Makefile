# Two commands to know: `make run` and `make check`. Needs Python 3.11 or later with venv, and nothing else.
SHELL := /bin/sh
.DEFAULT_GOAL := help
# Compiled modules are kept: a cluster and its tests start the same programs over and over.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help run check test test-browser sweep shots story placement-story fuzz demo worker manage measure install install-test gallery ui package types lock lint trace strings hooks clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
NAME ?=
ARGS ?=
SECTION ?=
BASE ?=
ONLY ?=
RUNS ?=
NODES ?=
# Much of what the tests wait for is a lease, a copy or a page, not the processor: five at a time on two cores.
TEST_PROCESSES ?= 5

help:
	@echo "make run              run the whole cluster on this machine until Ctrl-C"
	@echo "make check            quick checks for daily work: lint, types, import contracts, unit tests"
	@echo "make test             all checks and all tests"
	@echo "make test-browser     only the browser tests; ARGS='-k sign_in' selects some of them"
	@echo "make sweep            long tests: races, random inputs, kills, two machines, fuzzing; prints a table"
	@echo "make lint             only the checks of the source"
	@echo "make trace            show which tests prove which rule; SECTION=\"1B http-1\" for a part; fails on a gap"
	@echo "make strings          write every visible string to build/strings.txt"
	@echo "make fuzz             send generated requests as admin and as a node and compare the answers with the API document"
	@echo "make demo             send the example request and check the answer; ARGS=--fresh uses a temporary cluster"
	@echo "make worker NAME=two  add a worker to the running cluster"
	@echo "make manage ARGS='nodes list'   run a management command on the running cluster"
	@echo "make measure          measure every figure beside its goal; BASE=<commit> compares, ONLY=streams,memory selects"
	@echo "make shots            take the screenshots in docs/pictures"
	@echo "make story            play docs/operators-story.md on five workers and take its pictures; ARGS=drained plays one scene, ARGS=day docs/operators-day.md, ARGS=models docs/models-walkthrough.md"
	@echo "make placement-story  play docs/placement-story.md on five workers and write down every reason"
	@echo "make ui               build the pages, if their sources have changed"
	@echo "make package          build the wheel in dist/: the worker, and with the extra 'server' everything"
	@echo "make types            generate the pages' types from the API document and their sentences from actions.py"
	@echo "make lock             update the lock files from requirements/*.in"
	@echo "make hooks            run quick checks before each commit"
	@echo "make clean            remove everything make has built; keep data"

# The first run installs for a minute or two; "ready in" counts from here.
run: export CLUSTER_MAKE_BEGAN := $(shell date +%s.%N)
run: gallery ui
	@exec $(BIN)/python -m localai_cluster.embedded.run

demo: gallery ui
	@exec $(BIN)/python -m examples.demo $(ARGS)

worker: install
	@exec $(BIN)/python -m localai_cluster.embedded.attach worker "$(NAME)"

manage: install
	@exec $(BIN)/python -m localai_cluster.embedded.attach manage "$(ARGS)"

# `make measure BASE=<commit> RUNS=7 ONLY=streams,fleet`. The pages need a browser; HEAP_MINUTES shortens the ten
# minutes of their memory figure.
measure: export BASE := $(BASE)
measure: export RUNS := $(RUNS)
measure: export ONLY := $(ONLY)
measure: export NODES := $(NODES)
measure: install-test gallery ui
	@$(BIN)/python -m tests.measure

install:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh requirements/install.sh run

install-test:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh requirements/install.sh run test

gallery: install
	@$(BIN)/python examples/gallery/build.py

ui: install
	@$(BIN)/python -m localai_cluster.embedded.build build

package: install ui
	@$(BIN)/python -m localai_cluster.embedded.build package

types: install
	@$(BIN)/python -m localai_cluster.embedded.build types

lint: install-test
	@$(BIN)/python -m tests.checks.steps lint

check: install-test
	@$(BIN)/python -m tests.checks.steps check

# One run for all tests: its summary names every failure and is the last thing printed.
test: lint gallery ui
	@$(BIN)/python -m tests.browser.install
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --ignore=tests/tooling

test-browser: install-test gallery ui
	@$(BIN)/python -m tests.browser.install
	@$(BIN)/python -m pytest tests/browser -n2 $(ARGS)

sweep: install-test gallery ui
	@exec $(BIN)/python -m tests.sweep

shots: install-test gallery ui
	@$(BIN)/python -m tests.browser.install
	@exec $(BIN)/python -m tests.browser.shots

story: install-test gallery ui
	@$(BIN)/python -m tests.browser.install
	@exec $(BIN)/python -m tests.browser.story $(ARGS)

placement-story: install-test gallery
	@exec $(BIN)/python -m tests.acceptance.placement_story

trace: install-test
	@exec $(BIN)/python -m tests.checks.trace $(SECTION)

strings: install-test types
	@exec $(BIN)/python -m tests.checks.strings

fuzz: install-test gallery
	@exec $(BIN)/python -m tests.fuzz

hooks:
	git config core.hooksPath .githooks

lock:
	@test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q -r requirements/lock.in; }
	@for name in run test minilm echo llama-cpp smollm2; do \
		no_deps=; case $$name in minilm|echo|llama-cpp|smollm2) no_deps=--no-deps;; esac; \
		$(BIN)/uv pip compile -q $$no_deps --python-version 3.11 --generate-hashes --no-header --no-annotate \
			requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done
	@$(BIN)/uv pip compile -q --python-version 3.11 --generate-hashes --no-header --no-annotate \
		-c requirements/run.txt pyproject.toml -o requirements/worker.txt
	@$(BIN)/uv pip compile -q --python-version 3.11 --generate-hashes --no-header --no-annotate \
		tests/sdks/requirements.in -o tests/sdks/requirements.txt

clean:
	rm -rf build dist static/dist static/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)
