# make demo   prompts → dataset with a real model on the CPU, one server crash included
# make test   lint, types and tests
# Both need nothing but Python ≥ 3.11 and make: they build .venv themselves.
# make test-sglang   the contract suite and one release on the real SGLang, on the CPU (3 GB, minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
LATER := tests/chaos/test_orphans.py tests/contract/test_faults.py
# uv from PATH, or a uv of our own inside .venv; never anything outside this folder.
UV := $(shell command -v uv 2>/dev/null || echo $(BIN)/uv)
INSTALL := $(UV) pip install --quiet --python $(BIN)/python -c constraints.txt
# What the demo does with Prefect stays in data/ as well.
DEMO_ENV := PREFECT_HOME=$(CURDIR)/data/demo/prefect

# Byte code is kept, whatever the caller's habit is: Prefect alone compiles for seconds otherwise.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo test test-sglang chaos faults fuzz lint unit bench docs constraints clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 4

demo: $(VENV)/.cpu
	@$(DEMO_ENV) $(BIN)/promptmill run demo
	@$(BIN)/promptmill show demo --random 1

test: lint unit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Two at a time, module by module, as most of them wait for a server; tests/conftest.py lets the long ones begin.
# What `make chaos` runs is left to it.
unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(LATER:%=--ignore=%)

# What takes long: kill -9 at 20 random moments, every fault that the simulator can act out, 200 rounds of random
# faults, of which `unit` plays a selection.
chaos: $(VENV)/.dev
	CHAOS_ROUNDS=20 ALL_FAULTS=1 CHAOS_FAULTS=200 $(BIN)/python -m pytest $(LATER) tests/chaos/test_random_faults.py

# Some rounds of random faults: three minutes of them.
faults: $(VENV)/.dev
	CHAOS_FAULTS=30 $(BIN)/python -m pytest -n 2 tests/chaos/test_random_faults.py

# Broken and odd files for readers, formats and policies; FUZZ_MINUTES says for how long (10).
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz.readers

test-sglang: $(VENV)/.dev $(SGLANG)/.made
	SGLANG_UNDER_TEST=real $(BIN)/python -m pytest tests/contract/test_sglang.py tests/flow/test_sglang_run.py

docs: $(VENV)/.dev
	$(BIN)/python docs/make_settings.py > docs/settings.md

bench: $(VENV)/.dev
	@for script in benchmarks/bench_*.py; do $(BIN)/python $$script --quick || exit 1; done

$(BIN)/python:
	@echo "making $(VENV) (a minute or two the first time)"
ifeq ($(UV),$(BIN)/uv)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "promptmill needs Python 3.11 or newer; name one: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check uv
else
	@$(UV) venv --quiet --python '>=3.11' $(VENV)
endif

$(VENV)/.cpu: pyproject.toml constraints.txt | $(BIN)/python
	@$(INSTALL) -e '.[cpu]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@$(INSTALL) -e '.[cpu,dev]'
	@touch $@ $(VENV)/.cpu

# pip finds a CPU build of torch where there is one, uv is ten times as quick with all the rest.
$(SGLANG)/.made: tests/sglang_cpu/requirements.txt tests/sglang_cpu/requirements-nodeps.txt tests/sglang_cpu/make_models.py | $(VENV)/.dev
	@echo "making $(SGLANG) (3 GB, some minutes the first time)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/pip install -qq --disable-pip-version-check $$(grep '^torch==' tests/sglang_cpu/requirements.txt)
	@$(UV) pip install --quiet --compile-bytecode --python $(SGLANG)/bin/python -r tests/sglang_cpu/requirements.txt
	@$(UV) pip install --quiet --compile-bytecode --python $(SGLANG)/bin/python --no-deps -r tests/sglang_cpu/requirements-nodeps.txt
	@$(SGLANG)/bin/python tests/sglang_cpu/make_models.py $(SGLANG)/models
	@touch $@

# Newest versions of everything, as names and versions only: an address of an index never gets in.
constraints: $(VENV)/.dev
	@for set in "cpu dev constraints.txt" "sglang sglang constraints-sglang.txt"; do \
	  set -- $$set; \
	  $(UV) pip compile --quiet --universal --python-version 3.11 pyproject.toml --extra $$1 --extra $$2 \
	    --upgrade --no-emit-index-url --no-header --no-annotate -o $$3; \
	  sed -i '1i # Names and versions only. Made by `make constraints`.' $$3; \
	done

clean:
	rm -rf $(VENV) $(SGLANG) .mypy_cache .ruff_cache .pytest_cache
