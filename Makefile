# Results are files: a target runs when its file is missing, and running again resumes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
KVQ := $(BIN)/kvq
# Two test processes of one thread each finish sooner on two cores than one process of two.
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n 2

DEMO := results/demo
DEMO_ARTIFACT := $(DEMO)/temporalkv-2bit
DEMO_EVAL := --task ruler,perplexity --compare fp16,kivi,temporalkv --bits 2 --context 512 --limit 4

.PHONY: help demo test test-fast lint artifacts bench clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvq needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: .venv/.installed  ## Run all tests.
	@$(PYTEST) tests

test-fast: .venv/.installed  ## Run the tests that take no longer than a few seconds each.
	@$(PYTEST) -m "not slow" tests

lint: .venv/.installed  ## Check the code with ruff.
	@$(BIN)/ruff check kvq_cli tests

artifacts: $(foreach bits,1 2 4,artifacts/reference/temporalkv-$(bits)bit/config.json)  ## Calibrate the artifacts of the built-in model.

artifacts/reference/temporalkv-%bit/config.json: | .venv/.installed
	$(KVQ) calibrate --method temporalkv --bits $* --out $(@D) --resume

demo: $(DEMO_ARTIFACT)/config.json  ## Calibrate, generate and evaluate at 2 bits on the built-in model.
	@echo; echo "== generate: a number that a long prompt hides, read back from the compressed cache"
	$(KVQ) generate --file examples/needle.txt --artifact $(DEMO_ARTIFACT) --max-new-tokens 24
	echo; echo "== evaluate: uncompressed, kivi and temporalkv at 2 bits on the same samples"
	$(KVQ) eval $(DEMO_EVAL) --artifact $(DEMO_ARTIFACT) --out $(DEMO)
	echo "All results are in $(DEMO)/."

$(DEMO_ARTIFACT)/config.json: | .venv/.installed
	@echo "== calibrate temporalkv at 2 bits"
	$(KVQ) calibrate --method temporalkv --bits 2 --out $(@D) --resume

bench: results/bench/generate.json  ## Measure decoding beside transformers' own caches.

results/bench/generate.json: | .venv/.installed
	$(KVQ) bench generate --compare kivi,temporalkv --bits 2 --out $(@D)

clean:  ## Remove the environment and all results (not the artifacts).
	rm -rf .venv results build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
