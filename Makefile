# Two commands do everything from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint docs clean

demo: $(VENV)/.installed
	$(BIN)/clearhead demo
	@echo "To use the command clearhead in this shell: source $(BIN)/activate"

test: lint
	$(BIN)/pytest -m "not slow and not gpu"

test-all: lint
	$(BIN)/pytest

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/site/build.py --out build/site

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV): once, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[plot,serve]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
