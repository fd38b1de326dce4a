# make demo | test | test-deploy | test-slow | fuzz | golden-compare | golden-record | coverage | lint | docs | bench | results
#      | results-page | studies-smoke | deploy-demo | lock | sbom
PYTHON ?= python3
VENV := .venv
comma := ,
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

EXTRAS := graph,images,parquet,tensorboard,report,deploy,export,dev
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# LOCKED=no installs the same versions without comparing hashes, for a registry that builds its own files.
LOCKED ?= yes
$(VENV)/installed: pyproject.toml constraints.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
ifeq ($(LOCKED),yes)
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
endif
	touch $@

# Its interpreter tests kernels for GPUs on a CPU; torch's builds for GPUs bring it along.
$(VENV)/triton: $(VENV)/installed
	$(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/pip install --quiet --disable-pip-version-check triton==3.9.0 \
		|| echo 'no Triton for this machine: kernels for GPUs are not tested'
	touch $@

.PHONY: demo test test-deploy test-slow fuzz golden-compare golden-record coverage lint docs bench results studies-smoke
.PHONY: deploy-demo results-page lock sbom

demo: $(VENV)/installed
	$(BIN)/profcil study demo --out runs/demo
	$(BIN)/profcil report runs/demo --out runs/demo/page.html --title "Three methods on handwritten digits"
	$(BIN)/profcil data examples digits --count 3 --out runs/demo/examples > /dev/null
	$(BIN)/profcil predict $$(ls -dt runs/demo/*-prolin-*/ | head -1) runs/demo/examples

test: $(VENV)/triton
	$(BIN)/python -m pytest -n 2

test-deploy: $(VENV)/installed
	$(BIN)/python -m pytest -n 0 -m deploy tests/deploy

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m 'slow and not deploy'

# Hostile files, messages and command lines: EXAMPLES of each kind. It ends with a table of attacks tried, refused and
# survived. The default suite tries a few.
EXAMPLES ?= 1000
fuzz: $(VENV)/installed
	PROFCIL_FUZZ=$(EXAMPLES) $(BIN)/python -m pytest -n 2 tests/fuzz

# Bits depend on torch, the compiler and the processor: on a machine without digests, two commits are compared instead.
golden-compare: $(VENV)/installed
	$(BIN)/python tests/golden/compare.py $(BASE)

golden-record: $(VENV)/installed
	$(BIN)/python tests/golden/compare.py --record

# The default suite; what it must reach at least is `fail_under` in pyproject.toml.
coverage: $(VENV)/triton
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term --cov-report=html:build/coverage

lint: $(VENV)/installed
	$(BIN)/ruff check src tests docs/*.py
	$(BIN)/ruff format --check src tests docs/*.py
	$(BIN)/mypy

$(VENV)/docs: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# Pictures of every figure, the page and the live view, in build/gallery and on the site. Screenshots need Chromium.
build/gallery/pictures.json: $(VENV)/installed docs/gallery.py $(shell find src/profcil/reporting src/profcil/live -type f)
	$(BIN)/python docs/gallery.py build/gallery

docs: $(VENV)/docs build/gallery/pictures.json
	$(BIN)/mkdocs build --strict

# Needs uv (`pipx install uv`). Versions of constraints.txt stay; new dependencies get the newest. `--no-emit-package`
# leaves out torch, and lock.toml the packages for GPUs that its build on PyPI asks for.
lock:
	uv pip compile pyproject.toml --config-file lock.toml $(foreach e,$(subst $(comma), ,$(EXTRAS)),--extra $(e)) \
		-c constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-package torch \
		--custom-compile-command 'make lock' --quiet -o requirements.lock
	$(PYTHON) tests/lock/pins.py requirements.lock constraints.txt

# The software bill of materials of the environment: CycloneDX as JSON, in build/.
sbom: $(VENV)/installed
	mkdir -p build
	$(BIN)/python tests/lock/sbom.py > build/sbom.json

bench: $(VENV)/installed
	$(BIN)/profcil bench

results: $(VENV)/installed
	$(BIN)/profcil study core --out runs/core

# The tables of the README and of docs/results.md between markers, and its figures, from the rows in results/.
results-page: $(VENV)/installed
	$(BIN)/profcil results page README.md docs/results.md --store results
	$(BIN)/python docs/results_figures.py

STUDIES := homogeneous severe support-sweep order-sweep ablation sensitivity modality scale-up weak-task memory-snapshots cost
SMOKE := runs/smoke
studies-smoke: $(VENV)/installed
	set -e; for s in $(STUDIES); do $(BIN)/profcil study $$s --scale smoke --jobs 2 --out $(SMOKE); done
	mkdir -p $(SMOKE)/tables
	set -e; for t in $(STUDIES) cta; do \
	  $(BIN)/profcil table $$t --scale smoke --out $(SMOKE) > $(SMOKE)/tables/$$t.md; \
	  $(BIN)/profcil table $$t --scale smoke --out $(SMOKE) --format latex > $(SMOKE)/tables/$$t.tex; \
	  $(BIN)/profcil table $$t --scale smoke --out $(SMOKE) --format csv > $(SMOKE)/tables/$$t.csv; done
	set -e; for f in accuracy cta explain heatmap final communication mismatch; do \
	  $(BIN)/profcil figure $$f $(SMOKE) --out $(SMOKE)/figures; done
	$(BIN)/profcil figure snapshots $$(dirname $$(ls $(SMOKE)/*-promax-*/snapshots.npz | head -1)) --out $(SMOKE)/figures
	$(BIN)/profcil figure embedding $$(dirname $$(ls $(SMOKE)/*-promax-*/replay.npz | head -1)) --out $(SMOKE)/figures
	$(BIN)/profcil report $(SMOKE) --out $(SMOKE)/page.html

deploy-demo: $(VENV)/installed
	$(BIN)/profcil deploy demo
