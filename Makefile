# Verbs of the project. `make demo` and `make test` are all that a newcomer needs.
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
CORE_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')
SANITIZERS := address,undefined thread
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: install demo test test-all check chart chaos ctest ctest-build ctest-sanitize fuzz proto bench clean help

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(CORE_SOURCES)
	VENV=$(VENV) scripts/install.sh
	@touch $@

install: $(STAMP) ## Create the venv and install the pinned set

demo: $(STAMP) ## Start a cluster, ask it three questions, stop it
	$(BIN)/twinpool demo

test: $(STAMP) ctest ## All tests of the fast tiers
	$(PY) -m pytest -m "not slow and not gpu" -n 2 --dist loadfile tests/unit tests/scenario tests/chart
	$(PY) -m pytest -m "not slow and not gpu" -n 2 --dist loadfile tests/faults/test_chaos.py tests/integration \
	  tests/faults/test_soak.py tests/faults/test_store_away.py::test_away_for_less_than_a_lease \
	  tests/faults/test_store_away.py::test_restarted_with_and_without_what_it_held

test-all: $(STAMP) ctest ctest-sanitize ## Every test that needs no GPU, slow ones included
	$(PY) -m pytest -m "not gpu" -n 2 --dist loadfile tests/unit tests/scenario tests/chart
	$(PY) -m pytest -m "not gpu" tests/integration tests/faults tests/compat tests/pods tests/kube

ctest-build:
	cmake -S . -B build/ctest -DTWINPOOL_TESTS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/ctest -j 2 >/dev/null

ctest: ctest-build ## C++ tests
	ctest --test-dir build/ctest --output-on-failure -j 2 --quiet

ctest-sanitize: ## C++ tests under ASan+UBSan and under TSan
	@for s in $(SANITIZERS); do \
	  cmake -S . -B build/ctest-$$s -DTWINPOOL_TESTS=ON -DTWINPOOL_SANITIZE=$$s -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null && \
	  cmake --build build/ctest-$$s -j 2 >/dev/null && \
	  ctest --test-dir build/ctest-$$s --output-on-failure -j 2 --quiet || exit 1; done

chart: $(STAMP) ## Write the Helm chart's schema and README, and test it
	$(PY) -m scripts.chart
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile tests/chart

chaos: $(STAMP) ## A whole cluster while everything dies: SEED= repeats a plan, SECONDS=600
	$(PY) -m tests.chaos $(if $(SEED),--seed $(SEED)) --seconds $(or $(SECONDS),600)

fuzz: $(STAMP) ## Fuzz the core (needs clang) and all that reads input: SECONDS_EACH=60 a target; what reaches new code joins the corpora
	scripts/fuzz.sh $(or $(SECONDS_EACH),60)
	$(PY) -m tests.fuzz --seconds $(or $(SECONDS_EACH),60)

check: $(STAMP) ## Formatters, linters, types, contracts, generated files
	VENV=$(VENV) scripts/check.sh

proto: $(STAMP) ## Regenerate twinpool/v1 from proto/
	PYTHON=$(PY) scripts/proto.sh

bench: $(STAMP) ## Benchmarks, quick form
	@for b in bench/*.py; do case $$b in bench/_*) ;; *) $(PY) $$b --quick --json || exit 1;; esac; done

clean: ## Remove what was built
	rm -rf build $(VENV)
