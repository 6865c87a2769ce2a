# Needs git, make and Python 3.11 or newer. scripts/bootstrap.sh brings uv where it is missing.

VENV ?= .venv
UV := scripts/bootstrap.sh
ARGS ?=
JSON ?=

# More than processors: half of the time a test waits.
JOBS ?= 3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test test-long test-peers test-third-party test-install test-recipes truth soak fuzz lint audit check bench bench-all bench-compare bench-reference bench-chart bench-tracing docs wheels lock grpc-stubs vendor-uplot traces sync sync-bench sync-demo clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)$$/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-23s%s\n", $$1, $$2}'

demo: sync-demo ## a cold call, a warm call and a tool call against a local server, with their timelines
	@.tools/demo/bin/spanwire demo $(ARGS)

demo-real: sync-demo ## the same on a small real model (builds llama.cpp: takes some minutes the first time)
	@.tools/demo/bin/python scripts/demo_real.py $(ARGS)

# What measures, and what counts the seconds of a restart, runs alone: a busy machine would be its fault. The rest shares
# the processors.
ALONE = tests/delay tests/soak
# A few of so many tests race with real servers, and lose one run in some thousands where a machine is busy. What fails is run
# once more, and listed as RERUN if it passes then; what is wrong fails twice.
AGAIN = --reruns 1
test: sync ## the test suite; ARGS="-k name" and the like go to pytest
ifeq ($(strip $(ARGS)),)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(AGAIN) $(addprefix --ignore=,$(ALONE))
	$(VENV)/bin/python -m pytest $(AGAIN) $(ALONE)
else
	$(VENV)/bin/python -m pytest $(ARGS)
endif

test-long: sync ## the rest of the suite: the same once more over other wires, and tests of the tests
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m long $(ARGS)

test-peers: sync ## tests against servers that other people wrote (installs them; needs the network)
	$(VENV)/bin/python -m pytest -m peers tests/peers $(ARGS)

test-third-party: sync ## plugins of third parties, from wheels in environments of their own (needs the network)
	$(VENV)/bin/python -m pytest -m third_party tests/third_party $(ARGS)

test-install: sync ## each extra in fresh environments of pip and uv, upgrades, other Pythons, weights (needs the network)
ifeq ($(strip $(ARGS)),)
	$(VENV)/bin/python -m pytest -m install -n $(JOBS) --dist worksteal --ignore=tests/install/test_wheels.py tests/install
	$(VENV)/bin/python -m pytest -m install tests/install/test_wheels.py
else
	$(VENV)/bin/python -m pytest -m install tests/install $(ARGS)
endif

test-recipes: sync ## the files of docs/recipes.md, inside FastAPI, Flask, Celery and others (installs them; needs the network)
	$(VENV)/bin/python -m pytest -m recipes tests/recipes $(ARGS)

fuzz: ## look for inputs that break parsers, codecs and connections (ARGS="sse -max_total_time=600")
	@UV_PROJECT_ENVIRONMENT=.tools/fuzz $(UV) sync --quiet --locked --only-group fuzz
	.tools/fuzz/bin/python -m fuzz.run $(ARGS)

truth: sync ## what was injected against what the timelines gave back, as a table (ARGS="textbook tls" for some)
	$(VENV)/bin/python -m benchmarks.truth $(ARGS)

soak: sync ## ten thousand mixed calls, and ten minutes of a server that is killed (SPANWIRE_SOAK_S=60 for less)
	$(VENV)/bin/python -m pytest -m soak -s tests/soak $(ARGS)

lint: sync ## style, formatting, types, import rules, lock file
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(UV) lock --check

audit: sync ## known vulnerabilities in what the lock file names (SPANWIRE_AUDIT=require: an error if nobody can be asked)
	$(VENV)/bin/python scripts/audit.py

check: lint audit test ## everything that a change must pass

bench: sync-bench ## what a token and a call cost, beside other clients (ARGS="burst --clients raw,openai,spanwire" JSON=file)
	.tools/bench/bin/python benchmarks/run.py $(if $(JSON),--json $(JSON)) $(ARGS)

bench-all: ## the same with LangChain and LiteLLM (installs them), and with all workloads: the better part of an hour
	@UV_PROJECT_ENVIRONMENT=.tools/bench-all $(UV) sync --quiet --locked --only-group bench-frameworks
	.tools/bench-all/bin/python benchmarks/run.py all --clients all $(if $(JSON),--json $(JSON)) $(ARGS)

bench-compare: sync-bench ## the working tree beside BASE, which git knows by that name: BASE=main
	$(if $(BASE),,$(error Say what to compare with, a branch, a tag or a commit: make bench-compare BASE=main))
	.tools/bench/bin/python benchmarks/compare.py $(BASE) $(ARGS)

bench-reference: sync-bench ## hold later runs against the ratios of the last one (JSON=file: of that one)
	.tools/bench/bin/python benchmarks/reference.py $(JSON)

bench-chart: sync-bench ## draw the last run into docs/benchmarks.svg (JSON=file: that one)
	.tools/bench/bin/python benchmarks/chart.py $(or $(JSON),.bench/latest.json) docs/benchmarks.svg

bench-tracing: sync-bench ## what tracing adds to a call, for each way of it (ARGS="--rounds 3")
	.tools/bench/bin/python benchmarks/tracing.py $(ARGS)

docs: ## build the pages of docs/ into site/
	UV_PROJECT_ENVIRONMENT=.tools/docs $(UV) sync --quiet --locked --only-group docs
	NO_MKDOCS_2_WARNING=1 .tools/docs/bin/mkdocs build --strict $(ARGS)

wheels: ## build every distribution into dist/
	$(UV) build --all-packages --out-dir dist

traces: sync ## make the traces in docs/traces/ anew
	@$(VENV)/bin/python scripts/export_traces.py $(ARGS)

lock: ## write uv.lock anew after a change of dependencies
	$(UV) lock $(ARGS)

grpc-stubs: ## write the gRPC plugin's message classes anew from its .proto files
	@UV_PROJECT_ENVIRONMENT=.tools/stubs $(UV) sync --quiet --locked --only-group stubs
	.tools/stubs/bin/python scripts/grpc_stubs.py
	$(VENV)/bin/ruff format --quiet plugins/spanwire-grpc/src/spanwire_grpc/stubs

vendor-uplot: sync ## fetch the chart library of `spanwire report` again, or another one (VERSION=1.6.32 SHA256=...)
	$(VENV)/bin/python scripts/vendor_uplot.py $(VERSION) $(SHA256)

clean: ## remove environments, caches and everything built
	rm -rf .venv .tools .bench .peers dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	git worktree prune 2>/dev/null || true
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

sync:
	@UV_PROJECT_ENVIRONMENT=$(VENV) $(UV) sync --quiet --locked

sync-bench:
	@UV_PROJECT_ENVIRONMENT=.tools/bench $(UV) sync --quiet --locked --only-group bench

# An environment of its own: only what the demo needs, and the one for development keeps what it has.
sync-demo:
	@[ -x .tools/demo/bin/spanwire ] || echo "Installing spanwire[cli,websocket,grpc,webhook] into .tools/demo (once)" >&2
	@UV_PROJECT_ENVIRONMENT=.tools/demo $(UV) sync --quiet --locked --no-dev --extra cli --extra websocket --extra grpc --extra webhook
