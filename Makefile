# `make demo` and `make test` work in a fresh clone: each makes the virtual environment it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test quality micro family docs screenshots pictures card clean

demo: $(VENV)/installed
	$(BIN)/paradraft demo

test: $(VENV)/installed
	$(BIN)/python -m pytest

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Times single operations and compares them with the committed baseline.
micro: $(VENV)/installed
	mkdir -p build
	$(BIN)/python -m pytest tests/micro/test_operations.py --benchmark-enable --benchmark-only --benchmark-quiet \
		--benchmark-max-time 0.3 --benchmark-json build/micro.json
	$(BIN)/python tests/micro/growth.py build/micro.json --figure build/micro.png

# Hours on two cores; stops and resumes.
family: $(VENV)/installed
	$(BIN)/python -m hf_paradraft.demo.build.family --work-dir build/family --output-dir hf_paradraft/demo/family

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

screenshots: $(VENV)/installed
	$(BIN)/python docs/screenshots.py

pictures: $(VENV)/installed
	$(BIN)/python docs/pictures.py

# Tables and figures of the docs, from bench.json: what paradraft bench --json wrote.
card: $(VENV)/installed
	$(BIN)/python hub_cards/render.py
	$(BIN)/paradraft report hf_paradraft/demo/family/bench.json --plot docs/bench

clean:
	rm -rf $(VENV) build dist

# torch first: its CPU build needs no other package, and nothing later may pull in a larger one.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
