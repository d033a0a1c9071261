# Everything people and CI run. Each target works on a fresh clone: it makes .venv first where needed.
.DEFAULT_GOAL := help
.PHONY: setup fix check test test-ray test-main test-slurm test-browser test-slurm-then-browser test-long test-environments test-faults soak test-loaded test-gpu bare-machine bench docs demo clean help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo
EVENTS ?= 200
SEED ?=
# Tests start hundreds of interpreters: what one has compiled is kept for the next, whatever the machine's settings say.
unexport PYTHONDONTWRITEBYTECODE
# Texts are UTF-8 in every language, modules those of .venv, and packages go there whatever pip is told elsewhere.
export PYTHONUTF8 := 1
unexport PYTHONHOME PYTHONOPTIMIZE PYTHONPATH PIP_PREFIX PIP_ROOT PIP_TARGET PIP_USER

# Compiled by all cores, where pip would use one for a minute. What no Python can compile (templates) is no error.
define install
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	cp tools/pip.conf .venv
	$(BIN)/python -m pip install --no-user --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib src || :
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev)
	touch $@ $(DEMO_STAMP)

# A part of what the development needs: the first command of a newcomer is not to wait for the rest.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,demo)
	touch $@

setup: $(STAMP)  ## make .venv with the package and the development tools

fix: setup  ## format, and repair what can be repaired
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

check: setup  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

# Beside each other, as those with clusters and a browser mostly wait. test-main prints as it goes, the others when they end.
test: setup  ## the whole test suite, with those of Ray, Slurm and the page, beside each other
	$(MAKE) --jobs 3 AFTERWARDS=tools/afterwards.sh test-ray test-main test-slurm-then-browser

test-main: setup  ## the part that needs no cluster and no browser
	POLLUX_PROMETHEUS=$$(tools/install_prometheus.sh) OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

test-slurm: setup  ## the Slurm backend against real daemons; installs them where it may
	$(BIN)/python tools/slurm/cluster.py install || test "$$CI" != true
	OMP_NUM_THREADS=1 $(AFTERWARDS) $(BIN)/pytest -n 2 --dist loadfile -m 'slurm and not long' tests/integration/slurm

test-ray: setup  ## the Ray backend against a real cluster in a namespace of its own
	OMP_NUM_THREADS=1 $(AFTERWARDS) tools/ray/inside.sh $(BIN)/pytest -m ray tests/integration/ray || \
		test $$? = 77 -a "$$CI" != true

test-browser: setup  ## the pages in a real browser; installs Chromium where it may
	tools/install_chromium.sh || test "$$CI" != true
	OMP_NUM_THREADS=1 $(AFTERWARDS) $(BIN)/pytest -n 2 --dist loadfile -m browser tests/browser

# Not beside each other, as they would be too many for two cores.
test-slurm-then-browser: setup
	$(MAKE) test-slurm
	$(MAKE) test-browser

test-long: setup  ## what `make test` shows, at more sizes and in more ways
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m 'long and not slurm'
	$(BIN)/python tools/slurm/cluster.py install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m 'long and slurm' tests/integration/slurm

test-environments: setup  ## a quick part of the suite in many surroundings: terminals, languages, users, signals, ...
	$(BIN)/python tools/test_environments.py

test-faults: setup  ## the long set of kills, stops, resumes and strange requests; prints seeds, tries nothing twice
	OMP_NUM_THREADS=1 POLLUX_SCHEMA_EXAMPLES=200 $(BIN)/pytest -n 2 --force-reruns 0 -m 'not gpu' \
		--events $(EVENTS) $(if $(SEED),--seed $(SEED)) tests/faults tests/integration/service/test_schema.py \
		tests/integration/service/test_random_sequences.py

soak: setup  ## preemptions and kills of the service in turns, MINUTES=60 or EVENTS=500 notices; goes on where it stopped
	$(BIN)/python tools/soak.py $(if $(filter file,$(origin EVENTS)),,--events $(EVENTS)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(SEED),--seed $(SEED))

test-loaded: setup  ## the whole test suite while other work loads every core and the disk; one more line of a table that lasts
	$(BIN)/python tools/loaded_tests.py $(if $(RUNS),--runs $(RUNS))

bare-machine:  ## demo and tests of a clean clone in a bare Debian; needs root and debootstrap; OPTIONS= as in tools/bare_machine.sh
	tools/bare_machine.sh $(OPTIONS)

test-gpu: setup  ## what only a GPU can show; needs one
	$(BIN)/pytest -m gpu tests/gpu tests/unit/agent

bench: setup  ## every benchmark
	$(BIN)/python benchmarks/run_all.py

docs: setup  ## the documentation, into site/
	$(BIN)/mkdocs build --strict

demo: $(DEMO_STAMP)  ## a service and five real training jobs that share four CPU slots; about three minutes
	$(BIN)/python examples/demo/run.py --output build/demo

clean:  ## remove what was built, keep .venv
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
