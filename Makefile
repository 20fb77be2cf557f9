# Results are files: a target runs when its file is missing, and running again resumes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
KVQ := $(BIN)/kvq
# Two test processes of one thread each finish sooner on two cores than one process of two.
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n 2 --dist worksteal

# Show a command as one would type it, then run it.
define kvq
echo; echo "$$ kvq $(1)"
$(KVQ) $(1)
endef

DEMO := results/demo
DEMO_ARTIFACT := $(DEMO)/temporalkv-2bit
# Equal windows for all: without them KIVI keeps 128 recent tokens in 16 bits, TemporalKV none.
WINDOWS := --set sinks=8 --set recent=32
DEMO_EVAL := --task ruler,perplexity --compare fp16,kivi,temporalkv --bits 2 $(WINDOWS) --context 512 --limit 2
ARTIFACTS := $(foreach bits,1 2 4,temporalkv-$(bits)bit channelkv-$(bits)bit) $(foreach bits,1 2 3 4,kvquant-$(bits)bit) \
	xquant xquant-cl
# Tables and figures of the papers: the files of each are below results/reproduction/MODEL.
MODEL ?= reference
OPTIONS ?=
COMPARED := results/reproduction/reference/compare
BENCH := --compare kivi,temporalkv --bits 2

.PHONY: help demo test test-fast lint artifacts list repro repro-fast reproduction compare bench gpu gpu-memory clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvq needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	echo "setting up .venv, once: some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The oldest Triton that the kernels are made for, in a folder of its own: they must compile well with that one, too.
.venv/oldest/.installed: pyproject.toml .venv/.installed
	@mkdir -p $(@D)
	if [[ $$(uname -s) == Linux ]]; then  # nowhere else there is a Triton
		oldest=$$(sed -nE 's/^ *"triton>=([0-9.]+);.*/\1/p' pyproject.toml)
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) "triton==$$oldest.*"
	fi
	touch $@

test: .venv/.installed .venv/oldest/.installed  ## Run all tests.
	@$(PYTEST) tests
	# What the first run compiled, executed as a GPU would.
	KVQ_TEST_PTX=sm_90 $(PYTEST) tests/kernels/test_compiled.py

test-fast: .venv/.installed  ## Run the tests that take no longer than a few seconds each.
	@$(PYTEST) -m "not slow" tests

lint: .venv/.installed  ## Check the code with ruff.
	@$(BIN)/ruff check kvq_cli kernels tests tools

artifacts: $(ARTIFACTS:%=artifacts/reference/%/config.json)  ## Calibrate the artifacts of the built-in model.

# A folder's name says what is calibrated: METHOD-BITSbit-OPTION-VALUE.
artifacts/reference/%/config.json: | .venv/.installed
	@IFS=- read -r method bits option value <<< "$(subst xquant-cl,xquant_cl,$*)"
	$(call kvq,calibrate --method $${method/_/-} $${bits:+--bits $${bits%bit}} $${option:+--set $$option=$$value} --resume)

demo: $(DEMO_ARTIFACT)/config.json  ## Calibrate, generate and evaluate at 2 bits on the built-in model.
	@$(call kvq,generate --file examples/needle.txt --artifact $(DEMO_ARTIFACT) --max-new-tokens 24)
	$(call kvq,eval $(DEMO_EVAL) --artifact $(DEMO_ARTIFACT) --out $(DEMO))
	echo "All results are in $(DEMO)/."

$(DEMO_ARTIFACT)/config.json: | .venv/.installed
	@$(call kvq,calibrate --method temporalkv --bits 2 --out $(@D) --resume)

list: .venv/.installed  ## List the papers' tables and figures: what each needs, and how far it is.
	@$(KVQ) reproduce --model $(MODEL)

table-% figure-% figures-% perplexity-% roofline-% sizes-% compare-%: .venv/.installed  # one of them: make table-temporalkv-6 MODEL=...
	@$(call kvq,reproduce $@ --model $(MODEL) $(if $(OPTIONS),--options '$(OPTIONS)'))

repro: .venv/.installed  ## Make all tables and figures that need no GPU, on the built-in model; then docs/REPRODUCTION.md.
	@$(call kvq,reproduce --all)
	$(call kvq,reproduce --page docs/REPRODUCTION.md)

repro-fast: .venv/.installed  ## Make those that take little time.
	@$(call kvq,reproduce --all --fast)

reproduction: .venv/.installed  ## Write docs/REPRODUCTION.md: the papers' claims, our numbers, what holds.
	@$(call kvq,reproduce --page docs/REPRODUCTION.md)

compare: compare-fair compare-paper  ## Compare all methods at 4, 3, 2 and 1 bits; writes docs/COMPARISON.md.
	@{ cat docs/comparison-head.md
	for windows in fair paper; do
	test $$windows = fair && echo "## Equal windows" || echo "## Each paper's own windows"
	echo; echo "![scores over measured bits](comparison-$$windows.png)"; echo
	cat $(COMPARED)-$$windows/claims.md; echo
	$(KVQ) results $(COMPARED)-$$windows --format markdown --plot docs/comparison-$$windows.png; echo
	done; } > docs/COMPARISON.md
	echo "written: docs/COMPARISON.md"

bench: results/bench/generate.json  ## Measure decoding beside transformers' own caches.

results/bench/generate.json: artifacts/reference/temporalkv-2bit/config.json | .venv/.installed
	@$(call kvq,bench generate $(BENCH) --out $(@D))

# Needs no .venv: the Python it is given, with torch, triton and transformers, on a machine with a GPU.
GPU_PYTHON = PYTHONPATH=$(CURDIR):$(CURDIR)/kernels MPLBACKEND=Agg HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 $(PYTHON)
GPU_NAME = $(PYTHON) -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))'
GPU_METHODS := fp16,kivi,squat,innerq,temporalkv,xquant
ifdef DRY
GPU_PYTHON := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(GPU_PYTHON)
GPU_NAME := echo dry
GPU_TESTS := tests/kernels/test_tuning.py tests/kernels/test_reference.py
GPU_OUT := results
GPU_KERNELS := --dry --tune-seconds 5
GPU_CALIBRATE := --random tiny --samples 3 --seqlen 256 --set hybrid=off --device cpu
GPU_GROWTH := --random tiny,reference --context 96 --tokens 2 --batch 4 --device cpu
else
GPU_TESTS := tests/kernels
GPU_OUT := benchmarks
GPU_KERNELS := --tune-seconds 100 --seconds 80
GPU_CALIBRATE := --random llama-3.1-8b --layers 2
GPU_GROWTH := --random llama-2-7b,llama-3.1-8b,llama-3.2-1b --context 2048 --tokens 8 --batch 4096 --seconds 45
endif

gpu:  ## On a GPU: test, tune and measure the kernels, in ten minutes; results in benchmarks/. DRY=1: tiny, on a CPU.
	@place=$(GPU_OUT)/$$($(GPU_NAME)); mkdir -p $$place
	beside=$$($(PYTHON) -c 'import xdist, os; print("-n", min(8, os.cpu_count()))' 2>/dev/null || true)
	echo "kernel tests"
	$(GPU_PYTHON) -m pytest -m "gpu and not slow" -x $$beside $(GPU_TESTS)
	$(if $(DRY),,$(MAKE) --no-print-directory gpu-memory)
	$(GPU_PYTHON) -m kvq_cli bench kernels $(GPU_KERNELS) --tune --out $$place
	$(GPU_PYTHON) -m kvq_cli bench calibrate $(GPU_CALIBRATE) --out $$place
	$(GPU_PYTHON) -m kvq_cli bench generate $(GPU_GROWTH) --compare $(GPU_METHODS) --bits 2 --grow --out $$place
	$(if $(DRY),,$(GPU_PYTHON) -m kvq_cli bench report $$place)
	echo "All results are in $$place/."

gpu-memory:  # under the memory checker, where there is one that knows the GPU: its own errors end with 9
	@command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here: memory is not checked"; exit 0; }
	export PYTHONPATH=$(CURDIR):$(CURDIR)/kernels PYTORCH_NO_CUDA_MEMORY_CACHING=1
	timeout 60 compute-sanitizer --error-exitcode 9 $(PYTHON) -m kvq_cli bench kernels --check && exit 0 || code=$$?
	test $$code != 9 || { echo "compute-sanitizer found errors" >&2; exit 9; }
	echo "compute-sanitizer did not finish here (code $$code): memory is not checked"

clean:  ## Remove the environment and all results that git does not hold (not the artifacts).
	rm -rf .venv $(filter-out results/reproduction,$(wildcard results/*)) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
