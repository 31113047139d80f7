# Every target makes what it needs in $(VENV). PYTHON, VENV and PYTEST_ARGS may be set on the command line.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A GPU machine brings its own torch: `make test VENV_ARGS=--system-site-packages` uses it.
VENV_ARGS ?=
TORCH ?= torch==2.13.0
# What pip and setuptools say of themselves, in an environment that only make uses.
export PIP_ROOT_USER_ACTION ?= ignore
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Tests start some thirty processes: the first compiles a source for all of them.
export PYTHONDONTWRITEBYTECODE :=
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install -qq

LANES := test-operators test-kernels test-rewrite test-report test-distributed test-packaging test-bench test-fuzz

.PHONY: everything demo docs test test-slow test-all test-integrations test-mutations test-matrix test-nightly $(LANES) dist bench lint clean

# The site, into build/site; links are strict.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# On idle cores: with other work beside it, OMP_WAIT_POLICY=PASSIVE keeps threads that wait from spinning.
demo: $(VENV)/.demo
	$(BIN)/python -m bench.demo $(DEMO_ARGS)

test: $(VENV)/.test $(VENV)/.libraries
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	    $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(PYTEST_ARGS)

# One folder of tests, such as `make test-operators`: what `make test` runs of it.
$(LANES): test-%: $(VENV)/.test $(VENV)/.libraries
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	    $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/$* $(PYTEST_ARGS)

# What `make test` leaves out: more sizes, GPUs, placements and libraries of what it has one of, most rows with
# symbolic sizes or through AOTAutograd, more random programs, and all kernels in the interpreter again with sums
# of integers that overflow found.
test-slow: $(VENV)/.test $(VENV)/.libraries
	STREAMKL_VECTORIZED=1 OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	    $(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(PYTEST_ARGS)

# Plants every mutation of tests/support/mutations.py in a copy, and writes which test fails.
test-mutations: $(VENV)/.test $(VENV)/.libraries
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m tests.mutations --jobs 2 $(MUTATIONS_ARGS)

# Also what takes hours: tests marked slow, the whole corpus in every mode, 5,000 generated programs.
test-all: $(VENV)/.test
	STREAMKL_VECTORIZED=1 STREAMKL_FULL_CORPUS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
	$(BIN)/python -m tests.fuzz --programs 5000

# Each pair in an environment of its own; a Python that is not here is left out and said.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
TORCHES ?= 2.11.0 2.13.0 2.15.0
test-matrix:
	@for python in $(PYTHONS); do for torch in $(TORCHES); do \
	    if ! $$python --version >/dev/null 2>&1; then echo "$$python is not installed: left out"; continue; fi; \
	    echo "== $$python, torch $$torch"; \
	    $(MAKE) test PYTHON=$$python TORCH="torch==$$torch" VENV=.venv/matrix/$$python-$$torch || exit 1; \
	done; done

# The newest torch that is to be had (gigabytes): private names, texts of reports, the corpus.
NIGHTLY := tests/rewrite/test_torch_names.py tests/rewrite/test_moved_names.py tests/rewrite/test_corpus.py tests/report
test-nightly:
	rm -rf .venv/nightly
	$(MAKE) test TORCH=torch VENV=.venv/nightly PYTEST_ARGS="$(NIGHTLY) $(PYTEST_ARGS)"

dist: $(VENV)/.base
	rm -rf dist && $(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"

# Everything with the libraries that people train with; `make test` has a fast part of each.
test-integrations: $(VENV)/.test $(VENV)/.integrations $(VENV)/.losses
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/integrations $(PYTEST_ARGS)

bench: $(VENV)/.demo
	$(BIN)/python -m bench $(BENCH_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/torch_streamkl  # links in the layout of the installed package
	ln -s $(CURDIR)/torch_streamkl/* build/types/torch_streamkl/ && ln -sfn $(CURDIR)/fx_passes build/types/torch_streamkl/fx_passes
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml

# What lint, the site and the tests need by one run of pip, and in turn where something of it cannot be had.
everything: $(VENV)/.base
	$(INSTALL) --no-build-isolation --editable ".[lint,test,docs,integrations]" && \
	    touch $(VENV)/.lint $(VENV)/.test $(VENV)/.docs $(VENV)/.libraries || \
	    $(MAKE) $(VENV)/.lint $(VENV)/.test $(VENV)/.libraries

clean:
	rm -rf $(VENV) build *.egg-info

# torch first and by itself: with it in place nothing below pulls another build of it.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(INSTALL) --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -c "import torch" 2>/dev/null || $(INSTALL) "$(TORCH)"
	$(INSTALL) --no-build-isolation --editable .
	touch $@

# What of those libraries can be had here: what cannot is said, and its tests are skipped and counted.
$(VENV)/.libraries: $(VENV)/.base
	@$(INSTALL) --no-build-isolation --editable ".[integrations]" || \
	for each in transformers accelerate datasets trl peft lightning; do \
	    $(INSTALL) $$each || echo "$$each cannot be installed here"; \
	done
	@for each in speculators lightly; do \
	    $(INSTALL) --no-deps $$each || echo "$$each cannot be installed here"; \
	done
	touch $@

# Packages of which tests load the losses alone.
$(VENV)/.losses: $(VENV)/.base
	@for each in megatron-core speculators lightly sentence-transformers torchao; do \
	    $(INSTALL) --no-deps $$each || echo "$$each cannot be installed here"; \
	done
	touch $@

$(VENV)/.%: $(VENV)/.base
	$(INSTALL) --no-build-isolation --editable ".[$*]"
	touch $@
