# Everything happens in .venv, made from pyproject.toml and pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

.PHONY: demo test test-slow check format clean

demo: $(VENV)/.demo ## the whole graph on a laptop, on real text; again: only what is not done yet
	@$(BIN)/jumbo pretrain --preset laptop --run-uri "$(RUN)"

test: check ## lint, types and the fast tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(VENV)/.test ## what takes minutes: kill tests, the real demo, S3 end to end
	$(BIN)/python -m pytest -m "slow" --timeout 1800

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Jumbo needs Python 3.11 or newer; try make PYTHON=python3.12 demo")'
	@$(PYTHON) -m venv $(VENV)

# A stamp for each set of extras: made again when the requirements change.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing Jumbo and the demo's text into $(VENV); the first time takes a minute or more"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing Jumbo and the test tools into $(VENV); the first time takes a minute or more"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,test]'
	@touch $@ $(VENV)/.demo
