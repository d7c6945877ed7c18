# make train      a small GPT on the source of the Python standard library, with sharded optimizer state, and a sample of it
# make test       lint and all tests
# make test-all   the same and what takes minutes
# make test-kills training that is killed a hundred times and resumed
# make lint       ruff and mypy alone
# The virtual environment is made once; PYTHON=... chooses the interpreter, NPROC=... the number of ranks.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TWO_FILES_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder
INSTALLED := $(VENV)/installed
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
ifneq ($(filter-out 0 1,$(GPUS)),)
NPROC ?= $(GPUS)
else
NPROC ?= 2
ON_CPU := --device=cpu --compile=False
endif

.PHONY: train test test-all test-kills lint install

train: $(INSTALLED)
	$(BIN)/torchrun --standalone --nproc_per_node=$(NPROC) train.py config/train_stdlib_char.py \
		--gradient_accumulation_steps=$(NPROC) $(ON_CPU)
	$(BIN)/python sample.py --out_dir=out-stdlib-char --start="def " --num_samples=2 --max_new_tokens=400

test: $(INSTALLED) lint
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME)

test-all: $(INSTALLED) lint
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME) -m "slow or not slow"

test-kills: $(INSTALLED)
	$(BIN)/python -m pytest -m slow tests/checkpoint/test_kills.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@
