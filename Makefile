# make quickstart   set up .venv, train a small pruned ViT on the digits, print and draw what came out
# make test         set up .venv and run the tests (pytest -m slow and -m gpu run the others)
# make lint         ruff
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: quickstart test lint slow

quickstart: $(INSTALLED)
	$(BIN)/python tools/quickstart.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# torch and torchvision first, at the versions that belong together
$(INSTALLED): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.14.1 torchvision==0.29.1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(INSTALLED)
