# The first target that is made builds .venv (some minutes); it is built again when the two files it depends on change.
#   make demo    watch SEED happen        make lab     the notebooks in JupyterLab, on this machine only
#   make test    tests and notebooks      make lint    ruff, pyright       make bench   speed, as printed ratios
# PYTHON=/path/to/python chooses the interpreter (3.11 or newer).

BIN := .venv/bin
READY := .venv/.installed
PYTHONS = $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
DEBIAN := apt-get install build-essential cmake python3 python3-venv

# What is checked against its annotations while the tests run: all but the environments, which take a third longer so.
TYPED := $(shell ls seedkit/*.py seedkit/integrations/*.py | sed 's|/|.|g; s|.py$$|,|' | tr -d '\n')

.PHONY: demo test lab lint bench

demo: $(READY)
	$(BIN)/seedkit demo

# MALLOC_*: glibc keeps freed tensors instead of giving their pages back, up to a fifth less processor time in rollouts.
# 11_real_model needs SmolLM2 and minutes: tests/test_smollm2.py runs it, by hand.
test: $(READY)
	OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=2000000000 HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest -n 2 --dist loadfile --nbmake --nbmake-timeout=300 \
		--jaxtyping-packages=$(TYPED)beartype.beartype $(wildcard tests notebooks) --ignore=notebooks/11_real_model.ipynb

lab: $(READY)
	$(BIN)/jupyter-lab --ip=127.0.0.1

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks

# alfworld brings fast-downward-textworld and jericho, which pip builds from source: hence the compilers, and the PATH, for
# one build calls `python`, which Debian has not. pip compiles 19,000 Python files one after the other; compileall does it on
# all cores (files that are no Python do not matter).
$(READY): pyproject.toml constraints.txt
	@for tool in cc c++ make cmake; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	test -z "$$missing" || { echo "missing:$$missing. On Debian or Ubuntu: $(DEBIAN)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { for python in $(PYTHONS); do \
		if $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			exec $$python -m venv .venv; fi; done; \
		echo "no Python 3.11 or newer with venv among: $(PYTHONS). On Debian or Ubuntu: $(DEBIAN)" >&2; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[notebook,test,search,scale]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@
