# make demo    set up, then train a small model with a real swarm on this machine
# make test    set up, then run the tests
# make check   linters, types, import rules, generated code
# make sim     replay a seed of the simulator: make sim SEED=17
# make install only the virtual environment (.venv/bin/swarmentum, .venv/bin/swarmentum-coordinator)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt
BIN = .venv/bin

.PHONY: help install demo test sim check protos format watch clean
.DEFAULT_GOAL := help

help: ## Show this help.
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "swarmentum needs Python 3.11 or newer; say which with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || deploy/install-venv.sh $(PYTHON)
	$(PYTHON) -m venv .venv

.venv/.node: .venv/bin/python pyproject.toml deploy/constraints.txt
	@echo "Installing swarmentum and what it needs into .venv (a few minutes) ..."
	$(PIP) --editable '.[node]'
	@touch $@

.venv/.dev: .venv/.node
	$(PIP) --editable '.[node,dev]'
	@touch $@

.venv/.watch: .venv/.node
	$(PIP) --editable '.[node,watch]'
	@touch $@

install: .venv/.node ## Make .venv with the two commands.

demo: .venv/.node ## Train a small model with a real swarm on this machine (about two minutes).
	$(BIN)/swarmentum demo $(DEMO)

test: .venv/.dev ## Run the tests, a file at a time on each core; other pytest arguments in ARGS.
	$(BIN)/python -m pytest $(or $(ARGS),-n auto --dist loadfile --durations=40)

sim: .venv/.dev ## Replay a seed of the simulator (SEED=17), or play seeds 0 to 99.
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds 0 100) $(ARGS)

watch: .venv/.watch ## Install the extra for `swarmentum watch` (needs gcc and libgmp-dev on Linux).

check: .venv/.dev ## Linters, types, import rules, generated code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m protos.generate --check
	$(BIN)/buf lint --config protos/buf.yaml .

protos: .venv/.dev ## Generate protos/v1/*_pb2* again.
	$(BIN)/python -m protos.generate

format: .venv/.dev ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches.
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .import_linter_cache swarmentum-out
