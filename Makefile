# make demo    set up, then train a small model with a real swarm on this machine
# make test    set up, then run the tests (LONG=1: the long ones, too)
# make check   linters, types, import rules, generated code
# make attack  attack a fresh swarm with free identities, floods and lies
# make sim     replay a seed of the simulator: make sim SEED=17
# make docs    the docs as a site, in swarmentum-out/site
# make install only the virtual environment (.venv/bin/swarmentum, .venv/bin/swarmentum-coordinator)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# --no-compile: pip would compile all of torch and transformers on one core, which takes longer than all else together
# In a terminal it shows what it downloads: that is up to 6 GB.
PIP = .venv/bin/python -m pip install $$([ -t 2 ] || echo --quiet) --no-compile --disable-pip-version-check -c deploy/constraints.txt
BIN = .venv/bin
# Of join --set track=.... Triton's kernels run in its interpreter here; with a CUDA build of torch, triton comes by itself.
TRACKERS = tensorboard wandb trackio

.PHONY: help install demo test nightly attack sim check docs protos format watch clean
.DEFAULT_GOAL := help
# Some machines tell Python to keep no compiled modules. Then each process of a swarm compiles all of ours again.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this help.
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "swarmentum needs Python 3.11 or newer; say which with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || deploy/install-venv.sh $(PYTHON)
	$(PYTHON) -m venv .venv

.venv/.node: .venv/bin/python pyproject.toml deploy/constraints.txt
	@echo "Installing swarmentum and what it needs into .venv: 6 GB with torch for NVIDIA cards, 2 GB with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu (a few minutes) ..."
	$(PIP) --editable '.[node,charts]'
	@$(BIN)/python -c 'import coordinator.__main__, node.app, node.optim.demo, transformers.models.llama.modeling_llama, textual.app'
	@touch $@

.venv/.dev: .venv/.node
	$(PIP) --editable '.[node,charts,dev]'
	@touch $@

.venv/.watch: .venv/.node
	$(PIP) --editable '.[node,watch]'
	@touch $@

# What CI installs: one call of pip for all extras that need no compiler.
.venv/.ci: .venv/.node
	$(PIP) --editable '.[node,charts,dev,docs,data,trace]' $(TRACKERS) triton==3.9.0
	@touch .venv/.dev .venv/.docs $@

# In an environment of its own, which sees this one: transformers works otherwise where peft and accelerate are installed.
.venv/.lm-eval: .venv/.node
	$(BIN)/python -m venv --without-pip .venv/lm-eval
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo .venv/lm-eval/lib/python3.*/site-packages)/shared.pth
	$(BIN)/python -m pip --python .venv/lm-eval/bin/python install --quiet --disable-pip-version-check -c deploy/constraints.txt 'lm-eval[hf]'
	@touch $@

# Trainers that people use around an optimizer; in an environment of their own for the same reason.
.venv/.trainers: .venv/.node
	$(BIN)/python -m venv --without-pip .venv/trainers
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $$(echo .venv/trainers/lib/python3.*/site-packages)/shared.pth
	$(BIN)/python -m pip --python .venv/trainers/bin/python install --quiet --disable-pip-version-check -c deploy/constraints.txt accelerate lightning torchtitan triton
	@touch $@

.venv/.docs: .venv/.node
	$(PIP) --editable '.[node,docs]'
	@touch $@

install: .venv/.node ## Make .venv with the two commands.

demo: .venv/.node ## Train a small model with a real swarm on this machine (about two minutes).
	$(BIN)/swarmentum demo $(DEMO)

# Tests of one process run a file on each core, and torch has one thread in each: more threads than cores wait for each other.
# Tests that start swarms of their own run after them, three files at a time, so that no core is idle while a swarm waits. Long
# tests run with LONG=1, as in .ci/run; the longest run at night. Files with long tests come first (tests/conftest.py).
SWARMS = tests/attack tests/interop tests/system
FILES = --dist loadfile --no-loadscope-reorder
CHOSEN = not nightly$(if $(LONG),, and not long)

test: .venv/.dev ## Run the tests; arguments in ARGS. LONG=1: long tests, too.
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(CHOSEN)" -n auto $(FILES) --durations=15 $(addprefix --ignore=,$(SWARMS))
	$(BIN)/python -m pytest -m "$(CHOSEN)" -n 3 $(FILES) --durations=15 $(SWARMS)
endif

nightly: export SWARMENTUM_TEST_LM_EVAL = $(CURDIR)/.venv/lm-eval/bin/python
nightly: export SWARMENTUM_TEST_TRAINERS = $(CURDIR)/.venv/trainers/bin/python
nightly: export SWARMENTUM_TEST_COPIES = none
nightly: .venv/.dev .venv/.lm-eval .venv/.trainers ## Run all tests, the long ones too and with new random examples, and three minutes of faults.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --hypothesis-profile=default -n auto $(FILES) $(addprefix --ignore=,$(SWARMS))
	$(BIN)/python -m pytest $(SWARMS)
	$(BIN)/python -m tests.system.soak --peers 8 --minutes 3

sim: .venv/.dev ## Replay a seed of the simulator (SEED=17), or play seeds 0 to 99.
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds 0 100) $(ARGS)

attack: .venv/.dev ## Run all attackers of tests/attack against a fresh swarm, and print what came of it (SECONDS each: 20).
	$(BIN)/python -m tests.attack --seconds $(or $(SECONDS),20) $(if $(ONLY),--only $(ONLY))

watch: .venv/.watch ## Install the extra for `swarmentum watch` (needs gcc and libgmp-dev on Linux).

check: .venv/.dev ## Linters, types, import rules, generated code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house.generate_protos --check
	$(BIN)/buf lint --config protos/buf.yaml .

docs: .venv/.docs ## Build the docs as a site in swarmentum-out/site; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

protos: .venv/.dev ## Generate protos/v1/*_pb2* again.
	$(BIN)/python -m tests.house.generate_protos

format: .venv/.dev ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches.
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .import_linter_cache swarmentum-out
