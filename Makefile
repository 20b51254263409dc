# make demo, test, check and bench set themselves up in .venv, once; nothing else of the machine is touched but
# libibverbs1, a system library that the Mooncake wheel needs even for TCP.

PYTHON ?= $(shell command -v python3.13 || command -v python3.12 || command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# On Linux the default torch of PyPI is a CUDA build of several GB; this index has the CPU build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test check bench

demo: $(READY)
	$(BIN)/triptych demo --output outputs/demo.mp4

test: $(READY)
	$(BIN)/python -m pytest -m "not gpu"

check: $(READY)
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_imports.py

bench: $(READY)
	$(BIN)/triptych bench control
	$(BIN)/triptych bench transfer

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null \
		|| $(BIN)/pip install --retries 0 --timeout 20 --index-url $(TORCH_INDEX) "torch==2.13.0" \
		|| $(BIN)/pip install "torch==2.13.0"
	$(BIN)/pip install -e ".[cpu,dev]"
	@/sbin/ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 || command -v brew >/dev/null \
		|| { test "$$(id -u)" = 0 && apt-get update && apt-get install -y libibverbs1; } \
		|| echo "Mooncake needs a system library: sudo apt-get install -y libibverbs1"
	touch $@
