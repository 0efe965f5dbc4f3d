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

.PHONY: setup setup-browser setup-peers demo test test-ci test-all lint reference docs dry-run-cuda serve FORCE

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

# For the browser tests: Playwright's Python package, a package with axe-core, and Debian's Chromium unless there is one (root
# and apt).
setup-browser: setup
	$(PIP) playwright axe-playwright-python
	command -v chromium || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }

# For the tests against public packages, and for benchmarks: without what they depend on, some of which would replace torch.
setup-peers: setup
	$(PIP) --no-deps -r benchmarks/peers.txt

demo: setup
	$(BIN)/haed run --config quickstart

# A worker more than there are cores, or three more for slow tests, which wait for processes of their own; six at most. Tests of
# a file stay together; what is slow by its nature comes first, see tests/conftest.py. The workers share the cores, so each
# computes with one thread; what is to hold with several is tested in processes that are told how many
# (tests/pipeline/training/test_same_bits.py, benchmarks/torture.py). Bytecode is written, whatever the environment says: some
# hundred processes would compile the same modules.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS = $(shell echo $$(($(CORES) + $(MORE) < 6 ? $(CORES) + $(MORE) : 6)))
TEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: MORE := 1
test-ci test-all: MORE := 3

test: setup
	$(TEST) -m 'not slow and not nightly'

test-ci: setup
	$(TEST) -m 'not nightly'

test-all: setup
	$(TEST)

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The generated pages of docs/reference: after a change of an option or of a command's arguments.
reference: setup
	$(BIN)/python -m dev.generate_reference

# The site of docs/ in site/. A link to a page or heading that is missing fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# torch's CUDA build (3 GB to fetch, 5 on the disk) in an environment of its own, which takes all else from the other; gcc.
dry-run-cuda: setup
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  "torch===$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(.venv-cuda/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
	.venv-cuda/bin/python benchmarks/dry_run_cuda.py

serve: setup
	$(BIN)/haed serve
