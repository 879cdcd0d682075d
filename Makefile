# One command per wish; `make help` lists them. Everything runs in .venv, which the first command creates.

PYTHON ?= python3
VENV ?= .venv
# Installed before everything else, so that no dependency pulls another build of it. TORCH="torch==2.13.0+cu130 ..." picks one.
TORCH ?= torch==2.13.0
EXTRAS ?= data,groot,eval,serve,log,dev
QUICKSTART_ARGS ?=
PYTEST_ARGS ?=
# Test processes; a file's tests stay together, so module fixtures are built once.
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart quickstart-groot test test-slow lint format test-distributed docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart        set up, record robot data in a simulator, train a small Pi0.5 on it, kill it, resume it, let it act"
	@echo "make quickstart-groot  the same with a small GR00T N1.7, on the same recorded data"
	@echo "make test              all CPU tests, linter and type checker"
	@echo "make test-slow         the long forms of short tests: every compiled pair of switches, resumed checkpoints, all seeds"
	@echo "make test-distributed  the multi-process tests, with the whole matrix of parallel layouts"
	@echo "make lint | format     linter and type checker | rewrite the formatting"
	@echo "make docs              regenerate docs/flags.md and the README's table"
	@echo "make install           only the virtual environment ($(VENV))"
	@echo "make clean             remove caches and the quickstart's outputs (not $(VENV): rm -r it by hand)"

install: $(STAMP)

$(STAMP): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; make PYTHON=python3.12 ...")'
	@echo "== install into $(VENV) (once, 1-3 minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq setuptools wheel
	$(BIN)/python -m pip install -qq "$(TORCH)"
	$(BIN)/python -m pip install -qq --no-build-isolation --editable ".[$(EXTRAS)]"
	# The published client that the server is tested with; it says that it needs numpy 1, and works with numpy 2.
	$(BIN)/python -m pip install -qq --no-deps openpi-client==0.1.2
	@touch $@

quickstart:
	@start=$$(date +%s); $(MAKE) --no-print-directory install && \
	$(BIN)/python tools/quickstart.py --install-seconds $$(( $$(date +%s) - start )) $(QUICKSTART_ARGS)

# Twice the steps of the other family's: until then its trials hardly succeed.
quickstart-groot:
	@$(MAKE) --no-print-directory quickstart QUICKSTART_ARGS="--model-name groot_n1_7 --train-iters 600 $(QUICKSTART_ARGS)"

# Linter, formatter and type checker run as tests too (tests/unit/test_house_rules.py), so one closing line tells everything.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "slow and not distributed_full" $(PYTEST_ARGS)

test-distributed: $(STAMP)
	$(BIN)/python -m pytest tests/distributed -m "" $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m megatron_vla.config.docs > docs/flags.md.new && mv docs/flags.md.new docs/flags.md
	$(BIN)/python tools/benchmark_table.py --write

clean:
	rm -rf outputs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
