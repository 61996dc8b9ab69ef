# Everything starts here: `make quickstart` shows what ultrabench does, `make test` proves it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch where the index has one; a machine with GPUs installs its own first.
TORCH ?= torch==2.13.0
# Of `make chaos`: how many faults, the seed that draws them, and their kinds (port_scan,other_user; default: all).
FAULTS ?= 200
SEED ?= 7
KINDS ?=
# Options of `make gpu-check`, such as GPU_CHECK="--only memory", GPU_CHECK=--cpu or GPU_CHECK=--nine.
GPU_CHECK ?=
# Of `make gpu-wheels`: what benchmarks/nine_minutes.py imports beside torch, numpy, rich and pynvml.
GPU_WHEELS ?= antlr4-python3-runtime hydra-core msgspec omegaconf
# Packages of which programs and tests import little or nothing.
SELDOM := tests? testing transformers databricks mlflow wandb tensorboard sqlalchemy coreweave_evaluations \
	_inductor alembic fastapi fontTools google huggingface_hub mypyc? onnx opentelemetry pip playwright pygments setuptools
empty :=
space := $(empty) $(empty)
# The parts of `make test` in the order of their start: those that wait for processes and deadlines, those that compute
# on one core, the longest ones first, and last parity tests, whose ranks keep both cores busy when all others have ended.
WAITING := slurm-t local-a-to-f slurm-others slurm-d-to-n local-g-to-z
COMPUTING := unit-b-to-k unit-studies unit-a unit-l-to-p unit-q-to-z check parity-l-to-z parity-a-to-k
PARTS := $(WAITING) $(COMPUTING)

# The programs that tests start import the same modules, so their bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart gallery docs test unit env format slurm-test parity campaign chaos mutations bench gpu-check gpu-wheels slurm-bench clean $(PARTS)

env: $(VENV)/installed

# pip would compile bytecode on one core, and also of what is seldom imported.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24" "setuptools>=77" wheel
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/pip install --quiet --no-compile --no-build-isolation -e ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 -x '/($(subst $(space),|,$(SELDOM)))/' $(VENV)/lib || true
	touch $@

quickstart: env
	$(BIN)/ultrabench sweep launch
	$(BIN)/ultrabench collect
	$(BIN)/ultrabench heatmap

# The manual as a site; a broken link or a page without a place fails.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --site-dir build/site

check: env docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.names

# The tests of one part: a line for every tenth of them while they run, then pytest's report with the slowest tests.
# Those that compute give way to those that wait, each of which is a chain of processes that start one after another.
unit-% parity-%: PRIORITY := nice -n 5
define part
@mkdir -p build/tests
@PART=$@ $(PRIORITY) $(BIN)/python -m pytest -p tests.progress --durations=15 $(1) >build/tests/$@.txt; status=$$?; cat build/tests/$@.txt; exit $$status
endef

# All parts that wait run at once, and beside them two that compute, which keep two cores busy. With more, waiting tests
# would wait longer, since they extend their deadlines on a loaded machine.
test: env
	$(MAKE) --jobs=7 --keep-going --no-print-directory $(PARTS)
unit: env
	$(BIN)/pytest tests/unit
unit-studies: env
	$(call part,tests/unit/analysis/studies/)
unit-a: env
	$(call part,tests/unit/a*/test_*.py)
unit-b-to-k: env
	$(call part,tests/unit/[b-k]*/)
unit-l-to-p: env
	$(call part,tests/unit/[l-p]*/)
unit-q-to-z: env
	$(call part,tests/unit/[q-z]*/)
parity-a-to-k: env
	$(call part,tests/parity/test_[a-k]*.py)
parity-l-to-z: env
	$(call part,tests/parity/test_[l-z]*.py)
local-a-to-f: env
	$(call part,tests/local/test_[a-f]*.py)
local-g-to-z: env
	$(call part,tests/local/test_[g-z]*.py)
slurm-d-to-n: env
	$(call part,tests/slurm/test_[d-n]*.py)
slurm-t: env
	$(call part,tests/slurm/test_t*.py)
slurm-others: env
	$(call part,tests/slurm/test_[!d-nt]*.py)

# All parity tests; `make test` leaves out layouts whose traits other layouts have.
parity: env
	$(BIN)/pytest -m parity

# The tests that `make test` leaves out.
campaign: env
	$(BIN)/pytest -m campaign

slurm-test: env
	$(BIN)/pytest -m slurm

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: env
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/collect.py 1000 16000
	$(BIN)/python benchmarks/figures.py 1000
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/progress.py
	$(BIN)/python benchmarks/hang.py 10

# The first hour with GPUs; see benchmarks/first-gpu-hour.md.
gpu-check: env
	$(BIN)/python benchmarks/gpu_check.py $(GPU_CHECK)

# Packages for a machine with GPUs, Python 3.12 and torch but no network, in the versions of this environment.
WHEELS := build/gpu-wheels
gpu-wheels: env
	mkdir -p $(WHEELS)
	$(BIN)/pip freeze --exclude-editable | grep -E "^($(subst $(space),|,$(GPU_WHEELS)))==" > $(WHEELS)/versions.txt
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $(WHEELS) -r $(WHEELS)/versions.txt
	rm -f $(WHEELS)/msgspec-*.whl
	grep "^msgspec" $(WHEELS)/versions.txt | xargs $(BIN)/pip download --quiet --no-deps --only-binary=:all: \
		--python-version 3.12 --implementation cp --dest $(WHEELS) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
	ls $(WHEELS)

# The pictures of examples/gallery/README.md, from results in examples/gallery.
gallery: env
	$(BIN)/python examples/gallery/draw.py

chaos: env
	$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED) $(if $(KINDS),--kinds $(KINDS))

# Plants every fault of tests/mutations.md and writes its table anew; `make test` plants a part of them.
mutations: env
	$(BIN)/python -m tests.mutations

slurm-bench: env
	$(BIN)/python benchmarks/submit.py
	$(BIN)/python benchmarks/goodput.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
