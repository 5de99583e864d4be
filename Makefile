# `make demo` and `make test` install what they need into .venv first. Everything else: `make help`.
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := codec swarm node scenarios
# For two cores: many tests wait more than they compute, inference servers do not.
WORKERS ?= 3
SERVER_WORKERS ?= 2
# The heavy marks. Tests of one file share their inference servers, so one worker has all of them. What judges time or
# memory runs alone.
SLOW := (slow or adversary or foreign or conformance) and not (alone or vllm or sglang or long or gpu)
SERVERS := (vllm or sglang) and not (alone or long or gpu)
ALONE := alone and not (long or gpu)
# The files that have one of these marks. To import all of them takes as long as a minute of tests.
marked = $$(grep -rlwE --include='test_*.py' 'mark[.]($(1))' tests | sort)
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
FUZZ_SECONDS ?= 600
ADVERSARY_SECONDS ?= 15
FUZZ_CASES ?= 1000000
FUZZ_SEED ?= 1
SECONDS ?= 600
HUNT_SEED ?= 1
export VENV

.DEFAULT_GOAL := help
.PHONY: help install engines demo test test-heavy test-slow test-servers test-alone test-long lint types fuzz fuzz-guided hunt adversary simulate wan lock audit clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

install: ## make .venv and install into it (TORCH=... PYTHON=... EXTRAS=... to choose; what was chosen before stays)
	@TORCH='$(TORCH)' PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' ./install.sh

# What a target needs of the extras, unless EXTRAS is given: added to what is there, if it is not.
demo: EXTRAS = torch
engines test test-heavy test-slow test-servers test-alone test-long lint types fuzz hunt adversary wan lock: EXTRAS = torch,test
fuzz-guided: EXTRAS = torch,test,fuzz

demo: install ## a trainer and four nodes on this machine, about two minutes
	$(BIN)/swarm-node demo $(DEMO_FLAGS)

engines: install ## the inference engines that heavy tests start, each into an environment in the user's cache
	$(BIN)/python -m scenarios.engines.vllm_environment & \
	$(BIN)/python -m scenarios.engines.sglang_environment && wait $$!

test: install ## the everyday tests, at most five minutes: WORKERS=3 at a time
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-heavy: install ## the heavy marks, in short form; one that skips has failed
	@for part in test-slow test-servers test-alone; do $(MAKE) --no-print-directory $$part || exit; done

test-slow: install ## of these: what starts no inference server, WORKERS=3 at a time
	$(BIN)/pytest -m '$(SLOW)' --no-skips -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS) $(call marked,slow|adversary|foreign|conformance)

test-servers: install ## of these: vLLM and SGLang, SERVER_WORKERS=2 at a time
	$(BIN)/pytest -m '$(SERVERS)' --no-skips -n $(SERVER_WORKERS) --dist loadfile $(PYTEST_FLAGS) $(call marked,vllm|sglang)

test-alone: install ## of these: what judges time or memory, one at a time; nothing may run beside it
	$(BIN)/pytest -m '$(ALONE)' --no-skips $(PYTEST_FLAGS) $(call marked,alone)

test-long: install ## those for which CI has no time
	$(BIN)/pytest -m long --no-skips $(PYTEST_FLAGS)

lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## pyright
	$(BIN)/pyright $(PACKAGES)

fuzz: install ## a million hostile messages for each reader, mutated payloads and chunks, and the property tests: hours
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -m 'hypothesis and not vllm and not sglang and not wan and not gpu and not foreign' $(PYTEST_FLAGS)
	$(BIN)/python -m scenarios.fuzz.codec --n 1000000
	$(BIN)/python -m scenarios.fuzz all --cases $(FUZZ_CASES) --seed $(FUZZ_SEED)

fuzz-guided: install ## every decoder of bytes from peers, guided by coverage (atheris, Linux), FUZZ_SECONDS=600
	$(BIN)/python -m scenarios.fuzz.guided --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m scenarios.fuzz.yamux --seconds $(FUZZ_SECONDS)

hunt: install ## the product's processes on virtual machines, with a fault at any effect: SECONDS=600 HUNT_SEED=1
	$(BIN)/python -m scenarios.hunt --time $(SECONDS) --seed $(HUNT_SEED) --keep hunt-failed.json

adversary: install ## every attack of docs/attacks.md on real processes, in full: ADVERSARY_SECONDS=15 a flood, half an hour
	ADVERSARY_SECONDS=$(ADVERSARY_SECONDS) ADVERSARY_PASSES=7 $(BIN)/pytest -m adversary --no-skips $(PYTEST_FLAGS)

simulate: install ## 10,000 simulated nodes, one step: forty minutes of one core, 3 GB
	$(BIN)/python -m scenarios.sim.egress --simulate 10000 --steps 1 --congestion bbr --json

wan: install ## the product on emulated links, as root: what was to be reached, and what was; a quarter of an hour
	$(BIN)/python -m scenarios.emulator.wan_table --plot wan.png

lock: install ## write requirements.lock anew: its versions, checked, and their hashes (UPGRADE="name ..." or all)
	$(BIN)/python -m tools.lock --upgrade $(UPGRADE)

audit: ## known advisories about what requirements.lock pins; says so where no database of them can be reached
	@test -x $(BIN)/python || EXTRAS=none TORCH= PYTHON='$(PYTHON)' ./install.sh
	@$(BIN)/python -m tools.audit

clean: ## forget the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis demo-out
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
