# Everything a fresh machine needs is made by `make setup`; the other targets call it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# The tests start many processes; each would compile all of raptor again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-browser wheel-test lint docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --editable '.[test,docs]'
	@# pip compiles on one core. A few files of the packages are templates, which do not compile.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(STAMP)

demo: setup
	$(BIN)/raptor demo --out runs/demo

# What uses one core runs two at a time, before the tests that use two.
test: setup
	$(MAKE) --jobs=2 --output-sync=target lint test-browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not browser'

test-browser: setup
	@command -v chromium >/dev/null 2>&1 || (command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ] && \
		apt-get update -qq && apt-get install -y -qq chromium >/dev/null) || true
	$(BIN)/python -m pytest tests/report/test_browser.py

# Also a part of `test`.
wheel-test: setup
	$(BIN)/python -m pytest tests/journeys/test_wheel.py

# The site in a browser: its search box needs a server. The tests build the site too.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'the site: http://127.0.0.1:8000 (Ctrl-C ends it)'
	@$(BIN)/python -m http.server --directory site --bind 127.0.0.1 8000

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
