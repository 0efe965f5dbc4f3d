# Two commands matter: `make demo` and `make test`. Both set up .venv first if it is missing or out of date.
#
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu     a build of torch without CUDA
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130   a build for some version of CUDA

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH_INDEX ?=

.PHONY: setup demo test lint serve

setup: $(READY)

# torch first and alone: its index holds nothing else. --no-build-isolation needs no network for the build itself.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

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
