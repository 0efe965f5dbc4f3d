# Two commands matter: `make demo` and `make test`. Both set up .venv first if it is missing or out of date.
#
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu     a build of torch without CUDA
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130   a build for some version of CUDA

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH_INDEX ?=

.PHONY: setup setup-browser demo test lint serve FORCE

setup: $(READY)

# Another index than last time: torch is replaced.
ifneq ($(TORCH_INDEX),)
ifneq ($(TORCH_INDEX),$(shell cat $(READY) 2>/dev/null))
$(READY): FORCE
endif
endif

# torch alone comes from its index, which lacks most of the other versions. --no-build-isolation needs no network for the
# build itself.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 …")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) pip setuptools wheel
	$(if $(TORCH_INDEX),$(PIP) --force-reinstall --no-deps --index-url $(TORCH_INDEX) torch)
	$(PIP) --no-build-isolation -e '.[dev]'
	echo '$(TORCH_INDEX)' > $(READY)

# For the browser tests: Playwright's Python package, and Debian's Chromium unless there is one (root and apt).
setup-browser: setup
	$(PIP) playwright
	command -v chromium || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }

demo: setup
	$(BIN)/haed run --config quickstart

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

serve: setup
	$(BIN)/haed serve
