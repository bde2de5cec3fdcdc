# From a fresh clone with Python >= 3.11 and nothing else: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo serve test check bench accept paper results clean

demo: .venv/.installed
	$(BIN)/slim demo

# The demo's three servers and network behind HTTP and gRPC, until Ctrl-C.
serve: .venv/.installed
	$(BIN)/slim serve --config examples/demo/cluster.toml

# Tests of live servers run one after the other: they share the machine's clock. All others use every core.
LIVE := tests/cli/test_demo.py tests/cluster tests/engine tests/serve
test: .venv/.installed-dev .venv-kserve/.installed
	$(BIN)/python -m pytest --numprocesses logical --dist loadfile $(LIVE:%=--ignore %)
	$(BIN)/python -m pytest $(LIVE)

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks

# The paper's tables and figures, made again; SLIM_CIFAR100 names the data (examples/reference/paper.py says more).
paper: .venv/.installed
	$(BIN)/python examples/reference/paper.py

# The tables of docs/reference-cluster.md, from runs that are stored by seed; goes on where it stopped.
results: .venv/.installed
	$(BIN)/python examples/reference/results.py

# Too long for CI: soaks, repeated kills, many seeds.
accept: .venv/.installed-dev
	$(BIN)/python -m pytest -m accept --timeout 36000

# kserve's client has its own environment: its gRPC stubs clash with tritonclient's in one process.
.venv-kserve/.installed: tests/serve/requirements-kserve.lock
	$(PYTHON) -m venv .venv-kserve
	.venv-kserve/bin/pip install --quiet --disable-pip-version-check -r tests/serve/requirements-kserve.lock
	touch $@

clean:
	rm -rf .venv .venv-kserve build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed, $(PYTHON) is $$($(PYTHON) --version); set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv .venv

# torch comes first and by exact version: any other requirement may pull several GB of CUDA packages.
.venv/.installed: requirements.lock pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

.venv/.installed-dev: requirements-dev.lock .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	touch $@
