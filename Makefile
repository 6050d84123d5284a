# Every target makes its own environment; nothing needs to be installed by hand but Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: demo test test-compiled lint bench bench-gpu docs clean

demo: $(VENV)/.lab            ## compare the methods on handwritten digits; writes runs/digits/report.html
	$(BIN)/dpscale compare digits --diagnostics --out runs/digits

test: $(VENV)/.test           ## the whole suite, or a part: make test ARGS='tests/engine'
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-compiled: $(VENV)/.test  ## every model family through torch's compiler: an hour or two
	$(BIN)/python -m pytest -n 2 --dist worksteal --compiled $(ARGS)

lint: $(VENV)/.test           ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench         ## whole loops beside plain PyTorch and Opacus, and what both do with awkward models
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/peers.py

bench-gpu: $(VENV)/.bench     ## on a GPU: what docs/performance.md shows, and how the cost grows
	$(BIN)/python benchmarks/loop.py --device cuda --campaign --warm 16
	$(BIN)/python benchmarks/growth.py --device cuda --precision tf32 --warm 12 --json docs/figures/growth.json

docs: $(VENV)/.docs           ## the pages as a site: open site/index.html, no server needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# One stamp per extra: torch first and pinned, so that nothing else can pull another build of it.
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) runs site
