# `make demo` and `make test` do all their own set-up, in .venv of this folder.

BIN := .venv/bin
# The first Python that is new enough and can make virtual environments.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$python && break; done)
# Pip's own build environments (for hatchling) read constraints from the environment only.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	$(BIN)/python -m pip install --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt

.PHONY: help demo test check chaos bench clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

demo: .venv/.runtime ## three supervisors on this machine, one of them killed, a take-over; needs no root
	@$(BIN)/gpuward demo

test: .venv/.dev ## all tests, with a real etcd, a real Docker engine and podman
	@tools/install-containers.sh & tools/install-etcd.sh; etcd=$$?; wait $$! && exit $$etcd
	$(BIN)/pytest -n 2

check: .venv/.dev ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chaos: .venv/.dev ## random faults on three nodes and a real etcd, from fresh seeds; RUNS=60, SEED=N, JOBS=1
	@tools/install-containers.sh & tools/install-etcd.sh; etcd=$$?; wait $$! && exit $$etcd
	$(BIN)/python -m tests.chaos.many --runs $(or $(RUNS),60) --jobs $(or $(JOBS),1) $(if $(SEED),--seed $(SEED))

bench: .venv/.dev ## the numbers of docs/benchmarks.md; all take more than an hour, ONLY="adoption lock_run" minutes
	@tools/install-etcd.sh
	@$(if $(filter supervisors,$(or $(ONLY),supervisors)),tools/install-peers.sh)
	$(BIN)/python -m benchmarks.run $(ONLY)

clean: ## remove what these targets made
	rm -rf .venv .cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "gpuward: no Python 3.11 or later that can make virtual environments;" \
		"install python3 and python3-venv (Debian, Ubuntu) or python3.11 (RHEL 9)" >&2; exit 1; }
	@echo "gpuward: making .venv and installing what it needs, once; this takes up to a minute"
	@$(PYTHON) -m venv .venv

.venv/.runtime: $(SOURCES) | .venv/bin/python
	@$(PIP) -e '$(if $(wildcard .venv/.dev),.[dev],.)'
	@touch $@

.venv/.dev: $(SOURCES) | .venv/bin/python
	@$(PIP) -e '.[dev]'
	@touch .venv/.runtime $@
