# `make demo` and `make test` work in a fresh clone: each makes the virtual environment it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test quality family docs screenshots card clean

demo: $(VENV)/installed
	$(BIN)/paradraft demo

test: $(VENV)/installed
	$(BIN)/python -m pytest

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Hours on two cores; stops and resumes.
family: $(VENV)/installed
	$(BIN)/python -m hf_paradraft.demo.build --work-dir build/family --output-dir hf_paradraft/demo/family

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

screenshots: $(VENV)/installed
	$(BIN)/python docs/screenshots.py

card: $(VENV)/installed
	$(BIN)/python hub_cards/render.py

clean:
	rm -rf $(VENV) build dist

# torch first: its CPU build needs no other package, and nothing later may pull in a larger one.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
