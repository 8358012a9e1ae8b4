# Commands for a fresh checkout; each finds a fitting Python and installs what it needs first.
#
#   make demo       the main job on real input, on a CPU, without downloads
#   make test       a smoke run on the newest JAX allowed, then the fast tests on the pinned one
#   make test-all   every test; appends the outcome to tests/RESULTS.md
#   make notebooks  runs the notebooks of examples/ and writes their outputs
#   make docs       the documentation, into build/site
#   make lint       ruff and pyright

SHELL := /bin/bash
export JAX_PLATFORMS ?= cpu

VENV := .venv/bin/python
# Tests of one table row share compiled functions, so they stay in one process.
# A process that dies ends the run: xdist can wait for ever for the tests it had.
PYTEST := -n 2 --dist loadgroup --max-worker-restart 0
# Devices of a sharded test wait for each other; on a busy machine the default of 40 s, after which
# XLA ends the process, is too short.
PATIENT := XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_collective_call_terminate_timeout_seconds=600"

.PHONY: demo test test-all smoke docs notebooks lint venv venv-newest clean

demo: venv
	@$(VENV) -u examples/demo.py

test: smoke venv
	@$(PATIENT) $(VENV) -m pytest $(PYTEST) -m "not slow and not gpu"

test-all: smoke venv
	@$(PATIENT) tools/test_all.sh $(PYTEST)

# Compiled without LLVM's expensive passes, which takes half the time.
smoke: venv-newest
	@XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" \
		.venv-newest/bin/python -m tools.smoke

docs: venv
	@NO_MKDOCS_2_WARNING=1 $(VENV) -m mkdocs build
	@echo "build/site/index.html; with its search: python -m http.server --directory build/site"

notebooks: venv
	@$(VENV) -m tools.notebooks

lint: venv
	@[ -x .venv/bin/pyright ] || $(VENV) -m pip install --quiet -c constraints.txt -e '.[lint]'
	@$(VENV) -m ruff check
	@$(VENV) -m ruff format --check
	@$(VENV) -m pyright

venv:
	@tools/make_venv.sh .venv test,examples constraints.txt

venv-newest:
	@tools/make_venv.sh .venv-newest train

clean:
	rm -rf .venv .venv-newest .cache
