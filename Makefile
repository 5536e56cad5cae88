# make tune: measure this machine and write report.html. make test: lint, types and tests.
PYTHON ?= python3
BIN := .venv/bin
REPORT ?= report.html
RUN_ARGS ?=
ENGINE_OUT ?= build/engine
# Other cases each day; a finding names its seed.
FUZZ_SEED ?= $(shell date +%Y%j)
ENGINE_ARGS ?=
TESTS = $(shell grep -rh '^ *def test_' tests | wc -l)
CUDA := $(if $(shell command -v nvidia-smi),$(shell echo ,cuda))

.DEFAULT_GOAL := help
.PHONY: help tune test said fuzz nightly lint format browser regret lookup kills audit engine engine-page clean

help:
	@echo "make tune     install into .venv, measure on the best device here, write $(REPORT)"
	@echo "make test     lint, types, $(TESTS) test functions: 10 to 40 minutes on two cores"
	@echo "make lint     ruff and mypy only              make format   let ruff rewrite the sources"
	@echo "make fuzz     10 minutes of hostile tables, databases, traces, logs and requests"
	@echo "make nightly  a million random plans on random tables, limits and machines"
	@echo "make kills    runs that are killed at 100 random moments, and what they lose"
	@echo "make lookup   what a plan, the first plan and opening a table cost here"
	@echo "make regret   what the shipped tables lose on batches that they were not tuned on"
	@echo "make engine   the plug-in measured in SGLang; make engine-page: its tables"
	@echo "make audit    packages, deployment and access of the service, as far as an offline check goes"
	@echo "make clean    remove .venv and caches"
	@echo
	@echo "Benchmarks without a target; --help or the file's first lines say more:"
	@echo "  python -m benchmarks.arms          every arm: does it run here, how wrong is it, one time"
	@echo "  python -m benchmarks.passes        all layers of a pass under each choice, on a GPU"
	@echo "  python -m benchmarks.plugin        what the hooks add to a pass of SGLang and of vLLM"
	@echo "  python -m benchmarks.service_load  the service under a thousand tables, slow clients and kills"
	@echo "  python -m benchmarks.same_plans    whether a change of the code changes a plan"
	@echo "  python -m benchmarks.vllm.run      the plug-in measured in vLLM"

tune: .venv/tune
	$(BIN)/nsa-tune run --device auto $(RUN_ARGS)
	$(BIN)/nsa-tune report --format html --out $(REPORT)
	@echo "The report is in $(REPORT)."

test: said lint browser
	$(BIN)/pytest -n 2

# Before lint, which takes minutes itself.
said:
	@echo "$(TESTS) test functions, many with several cases: 10 to 40 minutes on two cores."

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# --group needs pip 25.1; the pip that venv brings may be older.
.venv/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "nsa-tune needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

# The kernel libraries of a GPU need a newer torch than the one that CI is pinned to.
.venv/constraints.txt: .venv/pip constraints.txt
	if [ -n "$(CUDA)" ]; then grep -Ev '^(torch|triton)==' constraints.txt >$@; \
	else cp constraints.txt $@; fi

.venv/tune: .venv/constraints.txt pyproject.toml
	$(BIN)/pip install -c .venv/constraints.txt -e '.[tune,report$(CUDA)]'
	@touch $@

.venv/test: .venv/tune
	$(BIN)/pip install -c .venv/constraints.txt --group dev
	@touch $@

# The tests open reports in a real browser.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	command -v google-chrome >/dev/null || \
	if ! command -v apt-get >/dev/null; then \
	    echo "make test needs Chromium: install it with this system's package manager"; exit 1; \
	elif [ "$$(id -u)" = 0 ]; then \
	    apt-get update && apt-get install -y --no-install-recommends chromium; \
	elif command -v sudo >/dev/null; then \
	    sudo apt-get update && sudo apt-get install -y --no-install-recommends chromium; \
	else \
	    echo "make test needs Chromium: as root, apt-get update && apt-get install chromium"; exit 1; \
	fi

nightly: .venv/test
	PLANS=1000000 $(BIN)/pytest tests/backend/dispatch/test_plan_properties.py

fuzz: .venv/test
	$(BIN)/python -m tests.fuzz --seconds 600 --seed $(FUZZ_SEED)

lookup: .venv/tune
	$(BIN)/python benchmarks/lookup.py

# Held-out batches, measured on the GPU, replayed against the shipped tables.
regret: .venv/tune
	$(BIN)/python benchmarks/regret.py table benchmarks/held_out/*.zip benchmarks/held_out/*.tsv

kills: .venv/test
	$(BIN)/python -m tests.autotune.kills 100
	$(BIN)/python -m tests.autotune.kills 100 --writers 8

# What can be checked offline, in the environment that is there.
audit: $(if $(wildcard $(BIN)/python),,.venv/test)
	$(BIN)/python -m pip check
	$(BIN)/python -m pytest -q -n 0 tests/test_deploy.py tests/remote tests/fleet/service/auth
	@for unit in deploy/*.service; do \
	    systemd-analyze security --offline=true $$unit | tail -1; done || true
	@echo "Licences: deploy/licences.txt. Advisories, with a network:"
	@echo "  pip-audit --requirement deploy/serve.lock --require-hashes --disable-pip"

# In the environment that SGLang is in; docs/engine.md.
engine:
	@$(PYTHON) -c 'import sglang' || { echo "make engine needs SGLang: see docs/engine.md"; exit 1; }
	$(PYTHON) -m benchmarks.engine.synthesise $(ENGINE_OUT)/traces
	failed=; for kv in auto fp8_e4m3; do \
	    $(PYTHON) -m benchmarks.engine.run --kv $$kv --out $(ENGINE_OUT)/$$kv --seconds 3600 \
	        $(foreach name,chat short long,--trace $(ENGINE_OUT)/traces/$(name).jsonl) \
	        $(ENGINE_ARGS) || failed=$$kv; \
	done; [ -z "$$failed" ]

engine-page: .venv/tune
	$(BIN)/python -m benchmarks.engine.compare $(ENGINE_OUT)/*/result.json \
	    --markdown $(ENGINE_OUT)/engine.md || [ $$? = 1 ]

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
