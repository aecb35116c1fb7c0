# Each target prepares .venv from constraints.txt first, when it is missing or older than the list of what goes in.
# The demo has a small environment of its own.
# Needs nothing but Python with venv: make PYTHON=python3.12 demo

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Thousands of processes need not compile the package where the environment forbids to keep what was compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: help demo test instruments test-pythons test-engines test-libraries simulate simulate-bugs mutants chaos slurm study bench bench-check figures lint docs dist clean

help:
	@echo "make demo   train a network on digits that worker processes prepare"
	@echo "make test   run the tests, without the slow ones and the benchmarks"
	@echo "make instruments  run the slow tests that compare many ways, pipelines and stops with their models, and a few others"
	@echo "make test-pythons  run unit tests, and some others, on each Python that is here"
	@echo "make test-engines  run the tests on Ray and Dask, which are installed into an environment of their own"
	@echo "make test-libraries  run the tests of datasets that read with polars, DuckDB and others, in an environment of their own"
	@echo "make simulate  try to break the decisions of a pass, in simulated clusters: make simulate SECONDS=600"
	@echo "make simulate-bugs  plant bugs into these decisions, and see that the simulation finds each"
	@echo "make mutants  change lines of the package, and count the changes that tests notice: make mutants ROOMS=plan"
	@echo "make chaos  run the tests in which everything is killed, stopped and cut off"
	@echo "make slurm  run the job scripts on a Slurm of its own, as root on Debian"
	@echo "make study  run the tests that train and measure examples as their pages say"
	@echo "make bench  print the tables of benchmarks"
	@echo "make bench-check  measure what is claimed, and fail below 80 % of what was recorded"
	@echo "make figures  draw the pictures of the documents, and write their numbers and quotes, from recorded data"
	@echo "make lint   check format, style, types and prose"
	@echo "make docs   build the documentation in docs/_build"
	@echo "make dist   build sdist and wheel in dist, and run the first training with the wheel"
	@echo "make clean  remove all of the above, and .venv"

demo: .venv-demo/ready
	.venv-demo/bin/python examples/digits.py --epochs 8

test: .venv/ready
	$(PYTEST) --timeout 120

# Hundreds of rows, which take minutes together.
instruments: .venv/ready
	$(PYTEST) -m instruments --timeout 900 -o faulthandler_timeout=900 tests/behaviour

# Others than that of .venv run what needs no torch: make test-pythons PYTHONS="3.12 --torch newest"
PYTHONS :=

test-pythons: .venv/ready
	$(BIN)/python -m tests.pythons $(PYTHONS)

# Ray, Dask and what they bring along come on top of .venv, which stays as it is.
test-engines: .venv-engines/ready
	PYTHONDONTWRITEBYTECODE= .venv-engines/bin/python -m pytest -m engines --timeout 600 -o faulthandler_timeout=500 tests/platform/engines

# So do libraries with threads of their own.
test-libraries: .venv-libraries/ready
	PYTHONDONTWRITEBYTECODE= .venv-libraries/bin/python -m pytest -m libraries -n 2 --timeout 300 -o faulthandler_timeout=300 tests/platform/libraries

SECONDS := 60

simulate: .venv/ready
	$(BIN)/python -m tests.simulation --seconds $(SECONDS)

simulate-bugs: .venv/ready
	$(BIN)/python -m tests.simulation.bugs

# Rooms of the package and options: make mutants ROOMS="plan wire --mutants 20"
ROOMS :=

mutants: .venv-mutants/ready
	.venv-mutants/bin/python -m tests.mutants $(ROOMS)

chaos: .venv/ready
	$(PYTEST) -m chaos --timeout 120 tests/chaos

# RPCDATALOADER_SLURM_TESTBED names the folder whose up.sh brings a Slurm up; skipped without.
slurm: .venv/ready
	$(PYTEST) -m slurm --timeout 300 tests/platform/slurm

# Those of the storage formats alone: make study STUDIES=examples/storage_formats
STUDIES := examples

study: .venv/study
	$(PYTEST) -m study --timeout 300 -o faulthandler_timeout=300 $(STUDIES)

bench: .venv/ready
	$(BIN)/python -m tests.benchmark

bench-check: .venv/ready
	$(BIN)/python -m tests.benchmark --check
	$(BIN)/python -m tests.benchmark.startup --check

figures: .venv/ready
	$(BIN)/python -m tests.benchmark.pictures

lint: .venv/ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/hadolint examples/container/Containerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.benchmark.pictures --check

docs: .venv/ready
	$(BIN)/sphinx-build -W --keep-going --quiet docs docs/_build

dist: .venv/ready
	$(BIN)/python -m tests.wheel

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) "pip>=25.1" hatchling editables setuptools
	$(PIP) --group test --group docs --group lint --group recommender --no-build-isolation --editable .
	touch $@

# What the demo imports, without what tests, documents and linters need. Python compiles what it imports: of thousands
# of files, that is a part.
.venv-demo/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	$(DEMO_PIP) hatchling editables
	$(DEMO_PIP) --no-compile --no-build-isolation --editable . scikit-learn tqdm
	touch $@

.venv-demo/ready: DEMO_PIP := $(subst $(BIN),.venv-demo/bin,$(PIP))

# What studies need on top.
.venv/study: .venv/ready
	$(PIP) --group formats
	touch $@

# Environments that see what .venv has, and have more.
.venv-engines/ready .venv-libraries/ready .venv-mutants/ready: .venv/ready
	$(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%a)' % sysconfig.get_path('purelib'))" \
		> `echo $(@D)/lib/python*/site-packages`/below.pth
	$(subst -m pip,-m pip --python $(@D)/bin/python,$(PIP)) $(BROUGHT)
	touch $@

.venv-engines/ready: BROUGHT := --no-build-isolation --editable ".[ray,dask]"
.venv-libraries/ready: BROUGHT := --group libraries
.venv-mutants/ready: BROUGHT := --group mutants

clean:
	rm -rf .venv .venv-demo .venv-engines .venv-libraries .venv-mutants dist docs/_build .mypy_cache .pytest_cache .ruff_cache
