# make demo | test | long | campaign | lint: each builds .venv first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# 1: `make test` also runs what takes long, which saves collecting all tests and making shared results a second time.
LONG :=
SHARE := 1
FOR_S :=
# A test that takes longer hangs; some of the campaign's are whole commands that take an hour of a slow machine.
HANG_S := 7200
PART = -o faulthandler_timeout=$(HANG_S) --share $(SHARE) $(if $(FOR_S),--for-s $(FOR_S))
READY := $(VENV)/.installed
# Tests start hundreds of processes: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test long campaign lint clean
demo: $(READY)
	$(BIN)/xdeepserve demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(if $(LONG),-m 'not campaign')

long: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m 'long and not campaign'

campaign: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m 'campaign and not idle' $(PART) --durations=10
	$(BIN)/python -m pytest -m 'campaign and idle' $(PART)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "xdeepserve needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Setting up $(VENV) (once, a minute or so) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
