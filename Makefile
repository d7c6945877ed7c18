# make train       train a small GPT with sharded optimizer state on the source of the Python standard library, print samples
#                  and the report card, draw the metrics of the run
# make check       while you work: the linters, all tests that start no process, and a few that start ranks
# make test        run the linters and all tests except the slow ones; those of parity a second time, with buckets that travel
#                  between gloo ranks as they do between GPUs
# make test-all    run the linters and all tests, also those that take minutes, and more of them as on GPUs
# make test-kills  run the test that kills a training run a hundred times and resumes it
# make bench-gpu   in calls of nine minutes, measure everything that only a GPU can show; needs only torch, numpy, tqdm.
#                  PARTS="memory-xl profile": only these parts
# make lint        run ruff, mypy and shellcheck only
# make install     create the virtual environment only
#
# Each target creates the virtual environment if it is missing. PYTHON=... chooses the Python interpreter. NPROC=... chooses the
# number of ranks.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TWO_FILES_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder
AS_ON_GPU := test_data_parallel.py test_grad_scaler.py test_gpt.py::test_ten_steps[2]
AS_ON_GPU += test_muon.py::test_steps_are_those_of_torchs_optimizers[2] test_hybrid.py::test_the_weights_are_those_of_adamw[2-1]
AS_ON_GPU += test_hybrid.py::test_backward_passes_of_a_step_add_up_and_groups_fit
AS_ON_GPU := $(addprefix tests/zero/,$(AS_ON_GPU))
MORE_AS_ON_GPU := $(patsubst %,tests/zero/test_%.py,hybrid muon codecs any_model)
INSTALLED := $(VENV)/installed
CHECKED := test_gpt.py::test_ten_steps[2] test_hybrid.py::test_the_weights_are_those_of_adamw[2-1]
CHECKED += test_muon.py::test_steps_are_those_of_torchs_optimizers[2] checkpoint/test_any_to_any.py::test_some
CHECKED += test_grad_scaler.py::test_all_ranks_skip_or_none
CHECKED := $(addprefix tests/zero/,$(CHECKED)) tests/run/test_kills.py::test_a_kill_inside_a_save_leaves_a_whole_file[True]
CHECKED += tests/run/test_resume.py::test_the_end_of_a_run_is_saved_and_goes_on_bit_for_bit[2-flags0]
CHECKED += tests/run/test_guard.py::test_the_figures_are_sent_before_the_update_and_read_after_the_next_forward[False]
CHECKED += tests/test_train.py::test_dropout_depends_on_the_iteration_and_the_rank
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
ifneq ($(filter-out 0 1,$(GPUS)),)
NPROC ?= $(GPUS)
else
NPROC ?= 2
ON_CPU := --device=cpu --compile=False
endif

.PHONY: train check test test-all test-kills bench-gpu lint install

train: $(INSTALLED)
	$(BIN)/torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=$(NPROC) train.py config/train_stdlib_char.py \
		--gradient_accumulation_steps=$(NPROC) $(ON_CPU)
	$(BIN)/python sample.py --out_dir=out-stdlib-char --start="def " --num_samples=2 --max_new_tokens=400
	@cat out-stdlib-char/report.md
	$(BIN)/python dashboard.py out-stdlib-char --png=out-stdlib-char/pictures

check: $(INSTALLED) lint
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME) -m "not slow and not processes"
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME) $(foreach test,$(CHECKED),"$(test)")

test: $(INSTALLED) lint
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME)
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME) --as-on-gpu $(foreach test,$(AS_ON_GPU),"$(test)")

test-all: $(INSTALLED) lint
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME) -m "slow or not slow"
	$(BIN)/python -m pytest $(TWO_FILES_AT_A_TIME) --as-on-gpu $(foreach test,$(AS_ON_GPU) $(MORE_AS_ON_GPU),"$(test)")

test-kills: $(INSTALLED)
	$(BIN)/python -m pytest -m slow tests/run/test_kills.py

bench-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(PARTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck slurm/train.sbatch

install: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@
