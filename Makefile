# The commands of this project. `make` alone lists them.
SHELL := bash
PYTHON_ENV := scripts/python
PACKAGE_DIR ?= build/package
TESTS ?=
BENCH ?=
FUZZ ?=
SERVE ?=
MODELS ?=
MINUTES ?= 30
CHECKED := backend bench cli common gateway scripts/healthy.py scripts/package.py tests
# Bytecode is kept: the tests start some hundred processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(PYTHON_ENV) -m pytest -n auto --dist loadfile --no-loadscope-reorder
FAST := tests/common tests/rpc tests/engine/constraints tests/engine/planning $(wildcard \
  tests/gateway/*/test_*_to_*.py tests/gateway/*/test_*_answer.py tests/gateway/*/test_*_fields.py \
  tests/gateway/models/test_model_config.py $(addprefix tests/gateway/test_,sdk_fields.py \
  shell_arguments.py sse.py))

export PROMPT MODEL MODELS

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo demo-distributed serve test test-fast test-long test-models lint fuzz soak doctor bench protogen package wheel lock outdated vendor clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## install the backend into venv/ (see ./install.sh --help)
	@./install.sh

install-dev:
	@./install.sh --dev

serve: ## start the HTTP gateway (MODELS=folder, MODEL=path or hub id, SERVE="--port 0" …)
	@./install.sh --gateway
	@$(PYTHON_ENV) -m cli serve $(SERVE)

demo: install ## ask the default model (PROMPT="…", MODEL=path or hub id)
	@$(PYTHON_ENV) -m cli.demo

demo-distributed: install ## ask three ranks on this machine, each with a part of the model
	@RANKS=3 $(PYTHON_ENV) -m cli.demo

test: install-dev ## run the tests (TESTS="tests/install -k name" picks some)
	@$(PYTEST) --durations=20 $(TESTS)

test-fast: install-dev ## run the quick tests: no browser, no client programs, no large models
	@$(PYTEST) --durations=5 $(FAST)

test-long: install-dev ## run the tests with every random schedule, fault and family (hours)
	@TEST_LONG=1 $(PYTEST) --durations=20 $(TESTS)

test-models: install-dev ## try every architecture in a small size, and write the tables of families
	@mkdir -p build
	@TEST_LONG=1 OPENBLAS_NUM_THREADS=1 $(PYTHON_ENV) -m pytest -n auto --dist load \
	  -o junit_family=xunit1 --junitxml=build/models.xml \
	  tests/architectures tests/engine/vision/test_families.py; \
	  failed=$$?; \
	  $(PYTHON_ENV) -m tests.architectures.known build/models.xml >build/models-known.md && \
	  mv build/models-known.md docs/ && \
	  $(PYTHON_ENV) -m tests.architectures.known verdicts build/models.xml >build/verdicts.json && \
	  mv build/verdicts.json backend/engine/loading/family_verdicts.json && exit $$failed

lint: install-dev ## check style and types
	@$(PYTHON_ENV) -m ruff check .
	@$(PYTHON_ENV) -m ruff format --check .
	@$(PYTHON_ENV) -m mypy $(wildcard $(CHECKED))

fuzz: install-dev ## search for inputs that break a parser (FUZZ="--runs 1000 gbnf" picks)
	@$(PYTHON_ENV) -m tests.fuzz $(FUZZ)

soak: install-dev ## send a backend, then a gateway, every kind of request (MINUTES=30 each)
	@SOAK_SECONDS=$$((60 * $(MINUTES))) $(PYTHON_ENV) -m tests.soak

doctor: ## try this machine with a model, and write a report (MODEL=path or hub id)
	@./install.sh --gateway
	@$(PYTHON_ENV) -m cli doctor "$(MODEL)" build/doctor.json

bench: install-dev ## run the measurements (BENCH="…" names some, ORDER=gpu: in a GPU's order)
	@$(PYTHON_ENV) -m bench $(BENCH)

protogen: install ## regenerate wire/ from backend.proto
	@./install.sh --stubs

package: install ## create a directory that LocalAI can install (PACKAGE_DIR=…)
	@$(PYTHON_ENV) scripts/package.py "$(PACKAGE_DIR)"

wheel: install ## build the wheel with the mlx-backend command, in build/
	@$(PYTHON_ENV) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build .
	@ls build/mlx_backend-*.whl

lock: ## resolve requirements/*.in again (needs uv: make install-dev)
	@scripts/lock.sh

outdated: ## list the locked packages that have a newer version
	@scripts/lock.sh --outdated

vendor: ## fetch the chat page's libraries again, as gateway/page/vendor/SOURCES.txt lists them
	@scripts/vendor.sh

clean: ## remove everything that was installed or generated here
	rm -rf venv venv.lock wire .wire.* build .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
