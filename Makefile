# `make train` and `make test` do everything, the set-up included.
VENV ?= .venv
NP ?= 4
ARGS ?=
IN_VENV = . "$(VENV)/bin/activate" &&

.PHONY: help setup train ps test lint format bench clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: ## make the virtual environment (a second call does nothing)
	@VENV="$(VENV)" ./install.sh

train: setup ## four synchronous replicas on MNIST: make train NP=2 ARGS="--train_steps 500"
	$(IN_VENV) horovodrun --mpi-args="--mca orte_tag_output 0" -np $(NP) python train.py $(ARGS)

ps: setup ## a parameter server and three workers: make ps NP=3 ARGS="--sync_replicas"
	$(IN_VENV) mpirun --hostfile hostfile.example -np $(NP) python ps_mode.py $(ARGS)

test: setup ## every test: make test ARGS="-k data"
	$(IN_VENV) pytest $(ARGS)

lint: setup ## what CI checks of style
	$(IN_VENV) ruff check . && ruff format --check .

format: setup ## put the code into that style
	$(IN_VENV) ruff check --fix . && ruff format .

bench: setup ## speed against a plain Horovod loop, in one run
	$(IN_VENV) python bench/speed.py $(ARGS)

clean: ## remove the environment and caches
	rm -rf "$(VENV)" "$(VENV).lock" "$(VENV).log" .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
