# Everything a contributor runs. Tools and the package, editable, live in .venv; PYTHON is what that is made from.
PYTHON ?= python3
BIN := .venv/bin
# Compiled are the CPU levels that this CPU runs, or those of BLOCKCELL_LEVELS (setup.py): a file for each says so.
LEVELS := $(shell echo '$(BLOCKCELL_LEVELS)' | tr -d ' ')
BUILT := .venv/built-$(or $(LEVELS),runnable)
# What the demo needs is less than that, and part of it.
DEMO_ALONE := .venv/demo-$(or $(LEVELS),best)
DEMO := $(or $(wildcard $(BUILT)),$(DEMO_ALONE))
OLDEST := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < tuple(map(int, "$(OLDEST)".split("."))))

.PHONY: help demo test test-all test-peers test-frozen lint docs page bench gpu-check clean

help:  ## lists these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/make \1:\2/p' Makefile | awk -F: '{ printf "%-18s%s\n", $$1, $$2 }'

demo: $(DEMO)  ## trains on handwritten digits, and checks every op against float64
	$(BIN)/blockcell demo

# pytest has a process for each CPU: more threads of numpy's would take CPUs from each other
test test-all: export OPENBLAS_NUM_THREADS = 1
test: $(BUILT)  ## runs the tests, in some minutes
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

test-all: test  ## runs the longer tests, too, in hours
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m more
	$(BIN)/pytest -m 'slow or peers or engines or browser or frozen'
	$(BIN)/python tools/sanitizers.py memory
	$(BIN)/python tools/sanitizers.py threads

test-peers: $(BUILT)  ## compares with TensorFlow, Keras and PyTorch, where they are installed (the extra bench)
	$(BIN)/pytest -s -m peers

test-frozen: $(BUILT)  ## freezes a program by PyInstaller, where that is installed (the extra frozen), and runs it
	$(BIN)/pytest -m frozen

lint: $(BUILT)  ## checks style, types and Cython's hints
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PATH=$(BIN):$$PATH cython-lint pyx
	@# Cython calls it a mere hint when code that should run without the GIL takes it; here nothing may be printed.
	mkdir -p build/lint
	! for module in $(basename $(notdir $(wildcard pyx/_*.pyx))); do $(BIN)/cython -3 -Werror -X boundscheck=False \
	    -X wraparound=False -I pyx --module-name blockcell.$$module -o build/lint/ \
	    pyx/$$module.pyx; done 2>&1 | grep .

docs: $(BUILT)  ## builds the site in build/site; warnings are errors
	rm -rf docs/reference/generated build/site
	$(BIN)/sphinx-build -q -W --keep-going docs build/site
	@echo 'The site begins at build/site/index.html'

page: $(DEMO)  ## builds the page that learns digits in a browser, in build/page; takes npm
	$(BIN)/python examples/browser/make_page.py

bench: $(BUILT)  ## measures a few sizes beside other libraries that are installed; nothing else should run
	$(BIN)/python benchmarks/bench.py --quick

gpu-check:  ## compares and measures ONNX graphs on a GPU, with the PYTHON of a machine that has one
	$(PYTHON) -c 'import blockcell' || $(PYTHON) setup.py build_ext --inplace
	$(PYTHON) benchmarks/gpu_check.py

clean:  ## removes .venv and everything built
	rm -rf .venv build docs/reference/generated blockcell/*.so

# What pyproject.toml asks for to build, so that the build below reuses its objects instead of starting afresh. A .venv
# that has an old Python, or no pip as its Python came without one, is made anew: venv alone would keep what is there.
.venv/tools: pyproject.toml
	@if ! $(BIN)/python -c 'import pip; $(IS_NEW_ENOUGH)' 2> /dev/null; then \
	    $(PYTHON) -c '$(IS_NEW_ENOUGH)' || { echo "blockcell needs Python $(OLDEST) or later, and $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1): say which one to use, as in make $(MAKECMDGOALS) PYTHON=python$(OLDEST)" >&2; \
	    exit 1; }; $(PYTHON) -m venv --clear .venv; fi
	$(BIN)/pip install --quiet $$($(BIN)/python -c \
	    'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	touch $@

$(BUILT): EXTRA := dev
$(DEMO_ALONE): EXTRA := demo,onnx
$(BUILT) $(DEMO_ALONE): .venv/tools setup.py $(shell find pyx -type f)
	@echo 'Compiling the kernels takes some minutes'
	BLOCKCELL_LEVELS=$(lastword $(subst -, ,$@)) $(BIN)/pip install --quiet --no-build-isolation --editable '.[$(EXTRA)]'
	touch $@
