# Everything a contributor runs. Tools and the package, editable, live in .venv; PYTHON is what that is made from.
PYTHON ?= python3
BIN := .venv/bin
# Compiled are the CPU levels that this CPU runs, or those of BLOCKCELL_LEVELS (setup.py): a file for each says so.
LEVELS := $(shell echo '$(BLOCKCELL_LEVELS)' | tr -d ' ')
BUILT := .venv/built-$(or $(LEVELS),runnable)
# What the demo needs is less than that, and part of it.
DEMO_ALONE := .venv/demo-$(or $(LEVELS),best)
DEMO := $(or $(wildcard $(BUILT)),$(DEMO_ALONE))

.PHONY: demo page docs pictures test test-more test-exhaustive test-stateful test-soak test-faults test-fuzz test-mutants test-peers
.PHONY: test-engines test-page test-packages test-asan test-tsan test-freethreaded test-webgpu test-arm test-arm-short test-cpus
.PHONY: test-cpus-short bench
.PHONY: wheels gpu-check lint clean

demo: $(DEMO)
	$(BIN)/blockcell demo

# One that reads digits and learns them in a browser; fetches onnxruntime-web with npm to build/npm.
page: $(DEMO)
	$(BIN)/python examples/browser/make_page.py

# On all CPUs, up to eight.
test: $(BUILT)
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

# The site, in build/site; any warning is an error.
docs: $(BUILT)
	rm -rf docs/reference/generated build/site
	$(BIN)/sphinx-build -q -W --keep-going docs build/site
	@echo 'The site begins at build/site/index.html'

# Those of the site: examples, with espeak-ng, and measurements that are in docs/benchmarks; the page, as `make test-page`.
pictures: $(BUILT)
	$(BIN)/blockcell demo --output docs/images/demo.png
	$(BIN)/python examples/keyword.py docs/images/keyword.png
	$(BIN)/python examples/sunspots.py docs/images/sunspots.png
	$(BIN)/python benchmarks/report.py
	$(BIN)/python tests/lib/browser.py docs/images

# The combinations of parameters that `make test` leaves out.
test-more: $(BUILT)
	$(BIN)/pytest -m more

test-exhaustive: $(BUILT)
	$(BIN)/pytest -m slow tests/kernels/test_activations.py

test-stateful: $(BUILT)
	$(BIN)/pytest -m slow tests/reliability/test_stateful.py

test-soak: $(BUILT)
	$(BIN)/pytest -m slow tests/reliability/test_soak.py

test-faults: $(BUILT)
	$(BIN)/pytest -m slow tests/reliability/test_faults.py

test-mutants: $(BUILT)
	$(BIN)/pytest -m slow tests/repository/test_mutants.py

test-fuzz: $(BUILT)
	$(BIN)/pytest -s -m slow tests/reliability/test_fuzz.py

# Reads and writes past ends, and undefined behaviour; races between threads.  Each builds a copy with sanitizers.
test-asan: $(BUILT)
	$(BIN)/python tests/lib/sanitizers.py memory

test-tsan: $(BUILT)
	$(BIN)/python tests/lib/sanitizers.py threads

# With a PYTHON that has no GIL, such as python3.13t; makes an environment of its own.
test-freethreaded:
	$(PYTHON) tests/lib/freethreading.py

# Compiled for aarch64, and run by an emulator of it: on Debian, with gcc-aarch64-linux-gnu, qemu-user and its own Python.
test-arm: .venv/tools
	$(BIN)/python tests/lib/arm.py

test-arm-short: .venv/tools
	$(BIN)/python tests/lib/arm.py short

# For CPUs of x86-64 without AVX-512 and without AVX2, by an emulator of them: Debian's qemu-user, 7.2 or later.
test-cpus: $(BUILT)
	$(BIN)/python tests/lib/cpus.py

test-cpus-short: $(BUILT)
	$(BIN)/python tests/lib/cpus.py short

# With what is installed, of `pip install -e '.[bench]'`; with `pip install -e '.[torch]'` the part that needs PyTorch.
test-peers: $(BUILT)
	$(BIN)/pytest -m peers

# With Ray, Dask and Spark, of `pip install -e '.[engines]'`, and a Java.
test-engines: $(BUILT)
	$(BIN)/pytest -m engines

# The page of `make page` in the system's Chromium or Chrome, with `pip install -e '.[browser]'`.
test-page: $(BUILT)
	$(BIN)/pytest -m browser

test-packages:
	$(PYTHON) tests/lib/packages.py

# Those that this machine can make, into build/wheels.
wheels: .venv/tools
	$(BIN)/python tests/lib/wheels.py

# On GPUs that compute on the CPU, if they are installed; fetches onnxruntime's packages for WebGPU to build/webgpu.
test-webgpu: $(BUILT)
	$(BIN)/python tests/lib/webgpu.py

# Beside the peers that are installed, of `pip install -e '.[bench]'`; nothing else should run meanwhile.
bench: $(BUILT)
	$(BIN)/python benchmarks/bench.py --quick

# On a machine with a GPU, perhaps without a network: with what PYTHON has, onnxruntime-gpu or a WebGPU above all.
gpu-check:
	$(PYTHON) -c 'import blockcell' || $(PYTHON) setup.py build_ext --inplace
	$(PYTHON) benchmarks/gpu_check.py

lint: $(BUILT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PATH=$(BIN):$$PATH cython-lint pyx
	@# Cython calls it a mere hint when code that should run without the GIL takes it; here nothing may be printed.
	mkdir -p build/lint
	! for module in $(basename $(notdir $(wildcard pyx/_*.pyx))); do $(BIN)/cython -3 -Werror -X boundscheck=False \
	    -X wraparound=False -I pyx -I pyx/modules/$$module --module-name blockcell.$$module -o build/lint/ \
	    pyx/$$module.pyx; done 2>&1 | grep .

clean:
	rm -rf .venv build docs/reference/generated blockcell/*.so

# What pyproject.toml asks for to build, so that the build below reuses its objects instead of starting afresh.
.venv/tools: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $$($(BIN)/python -c \
	    'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	touch $@

$(BUILT): EXTRA := dev
$(DEMO_ALONE): EXTRA := demo,onnx
$(BUILT) $(DEMO_ALONE): .venv/tools setup.py $(wildcard pyx/* pyx/*/*.pxd pyx/*/*/*.pxd)
	@echo 'Compiling the kernels takes some minutes'
	BLOCKCELL_LEVELS=$(lastword $(subst -, ,$@)) $(BIN)/pip install --quiet --no-build-isolation --editable '.[$(EXTRA)]'
	touch $@
