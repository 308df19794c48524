# Two commands: `make up` serves a model, `make test` proves that it works. Both set up what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

MODEL ?=
PORT ?=
WORKERS ?=
ARGS ?=
PAGE := services/gateway/page
# auto: the CPU build of torch if there is no NVIDIA GPU; cpu: the CPU build; pip: what pip's index has.
TORCH ?= auto
INSTALL := $(BIN)/python scripts/install.py --torch '$(TORCH)'

.PHONY: up setup test coverage soak soak-kills soak-simulation chaos lint docs fmt page client-wheel proto bench bench-gpu bench-host peer-test client-test mutants compose-test clean help

help:
	@echo 'make up [MODEL=path PORT=n WORKERS=n TORCH=auto|cpu|pip ARGS=...] | test | coverage | soak | soak-kills | soak-simulation | chaos | lint | docs | fmt | page | client-wheel | proto | bench | bench-gpu | bench-host | peer-test | client-test | mutants | compose-test | clean'

up: $(VENV)/serve.stamp
	@exec $(BIN)/paceline up $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port $(PORT)) $(if $(WORKERS),--workers $(WORKERS)) $(ARGS)

setup: $(VENV)/dev.stamp $(VENV)/flashinfer-api/packages $(VENV)/etcd/usr/bin/etcd $(VENV)/redis/redis-server $(PAGE)/node_modules/.package-lock.json $(VENV)/prometheus/promtool

$(BIN)/python:
	@echo 'setup: creating $(VENV) with $(PYTHON)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'setup: Python 3.11 or newer is needed; on Debian or Ubuntu: apt-get install python3 python3-venv' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; echo 'setup: no venv module; on Debian or Ubuntu: apt-get install python3-venv' >&2; exit 1; }

# What serving needs. The stamps make the second `make up` take seconds.
$(VENV)/serve.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'setup: installing Paceline and what it serves with (some minutes the first time)'
	@$(INSTALL) '.[gateway,worker]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/serve.stamp
	@echo 'setup: installing the tools for tests and checks'
	@$(INSTALL) '.[dev]'
	@touch $@

# Without FlashInfer, its contract tests are skipped, and say so.
$(VENV)/flashinfer-api/packages: scripts/flashinfer_api.sh constraints.txt | $(VENV)/serve.stamp
	@echo 'setup: fetching the Python side of FlashInfer for its contract tests'
	@scripts/flashinfer_api.sh $(VENV)/flashinfer-api || echo 'setup: it could not be fetched' >&2

# Without etcd, the tests of two schedulers are skipped, and say so.
$(VENV)/etcd/usr/bin/etcd: | $(VENV)/serve.stamp
	@scripts/etcd.sh $(VENV)/etcd || echo 'setup: the tests of two schedulers are skipped' >&2

# Without redis-server, the tests of responses in Redis are skipped, and say so.
$(VENV)/redis/redis-server: | $(VENV)/serve.stamp
	@scripts/redis.sh $(VENV)/redis || echo 'setup: the tests of responses in Redis are skipped' >&2

# Without node and npm, the tests of the page's source are skipped, and say so. (Its build is committed.)
$(PAGE)/node_modules/.package-lock.json: $(PAGE)/package-lock.json
	@command -v npm >/dev/null && cd $(PAGE) && npm ci --silent --no-audit --no-fund || \
	  echo "setup: npm is missing or npm ci failed: the tests of the page's source are skipped" >&2

# Without Prometheus, the tests of alerts and dashboards are skipped, and say so.
$(VENV)/prometheus/promtool: | $(VENV)/serve.stamp
	@scripts/prometheus.sh $(VENV)/prometheus || echo 'setup: the tests of alerts and dashboards are skipped' >&2

# Files run in the order of their names. In xdist's own order the slowest tests, which kill processes, would come last.
test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5 $(ARGS)

# Lines and branches that unit, contract and simulation tests run; .coverage-html/index.html shows the others.
coverage: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --cov --cov-report=term --cov-report=html:.coverage-html tests/unit tests/contract tests/simulation $(ARGS)

# 30 minutes of random kills of real processes under mixed traffic: docs/reliability.md; then simulated runs with new seeds
# until Ctrl-C: docs/simulation.md. ARGS are for one of the two alone (ARGS='--minutes 5', ARGS='--seconds 600').
soak: soak-kills soak-simulation

soak-kills: setup
	$(BIN)/python -m tests.chaos.soak --out bench/results/chaos-soak $(ARGS)

soak-simulation: setup
	$(BIN)/python -m simulator.soak $(ARGS)

# Every service × fault × workload on real processes (half an hour), and a table of the pauses: docs/reliability.md.
chaos: setup
	PACELINE_CHAOS=1 $(BIN)/python -m pytest -s tests/chaos/test_hangs.py tests/chaos/test_standby.py tests/chaos/test_frozen_gateway.py
	$(BIN)/python -m tests.chaos.matrix --out bench/results/chaos $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/style.py
	$(BIN)/python scripts/page.py check
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' || { echo 'lint: conflict markers are left' >&2; exit 1; }
	scripts/proto.sh --check
	scripts/buf.sh

# Makes a site in build/site of docs/, the README and the files that they link to. A link to a page, file or heading
# that does not exist is an error.
docs: setup
	scripts/docs.sh

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Builds the gateway's page from its source. The build is committed, so that only a change of the page needs node.
page:
	python3 scripts/page.py build

# The Python client alone, without the server, in dist/.
client-wheel: setup
	cd deploy/client && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d $(CURDIR)/dist

proto: setup
	scripts/proto.sh

bench: setup
	$(BIN)/python -m bench.run $(ARGS)

# On a machine with an NVIDIA GPU and `pip install -e .[gpu]` in whatever Python is first in the PATH.
bench-gpu:
	python3 -m bench.gpu $(ARGS)

# Counts the GPU operations of sampling without a GPU (Triton interprets the kernels), and times the launch of a step.
bench-host: setup
	TRITON_INTERPRET=1 $(BIN)/python -m bench.device.host

# Compares our presets with the systems that they are named after, which run in environments of their own.
peer-test: setup
	tests/peer/env.sh vllm
	PEER_SGLANG_PYTHON=$$(tests/peer/env.sh sglang) $(BIN)/python -m pytest tests/peer $(ARGS)

# Clients of other projects, unmodified and each in an environment of its own, against running services: prints what worked,
# and writes it to bench/results/clients.md. ARGS='openai litellm' runs some.
client-test: setup
	$(BIN)/python -m tests.clients.run $(ARGS)

# Plants mistakes in the cores by rule and names those that no test notices (about an hour on two cores).
mutants: setup
	$(BIN)/python -m tests.mutation.run $(ARGS)

compose-test:
	bash tests/compose/run.sh

clean:
	rm -rf $(VENV) build dist .coverage .coverage-html .pytest_cache .mypy_cache .ruff_cache .hypothesis
