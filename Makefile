PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEXT := .venv-next

# the tests start hundreds of processes: none shall compile torch's and its own sources anew
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-soak test-next lint docs clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/.test lint docs
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow" --durations 40

# names are printed as tests end, so that a run that is cut off has said which of them failed
test-slow: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "slow and not soak" -vv --no-header --disable-warnings --durations 60

test-soak: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m soak -vv --no-header --disable-warnings

# the quick tests on the newest torch and transformers, in an environment of their own
test-next:
	test -x $(NEXT)/bin/python || $(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python scripts/newest.py --quiet
	$(NEXT)/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

docs: $(VENV)/.test
	$(BIN)/sphinx-build -q --fail-on-warning --keep-going --builder html docs build/docs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0

$(VENV)/.demo: setup.cfg constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable .[demo]
	touch $@

$(VENV)/.test: setup.cfg constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .[hf,finetune,docs,bench,trl,lightning,sweep,test]
	touch $@

clean:
	rm -rf $(VENV) $(NEXT) build *.egg-info runs
