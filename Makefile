# make demo, test, check and bench set themselves up in .venv, once, test-vision in .venv-vision; nothing else of the
# machine is touched but libibverbs1, a system library that the Mooncake wheel needs even for TCP.

# The first Python that runs and is new enough; a command may exist and yet be an empty shim.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A second environment, for models whose processors work with torchvision (Qwen-Image-Edit and its kind) and for torchao.
VISION := .venv-vision
VISION_READY := $(VISION)/.ready
# Where the plain torch is a CUDA build of several GB: make demo TORCH_INDEX=<address of an index of CPU builds>
TORCH_INDEX ?=

.PHONY: demo test test-vision test-gpu check bench chaos families fuzz soak

demo: $(READY)
	$(BIN)/triptych demo --output outputs/demo.mp4

# Three at a time, each with one thread: much of a test is waiting for other processes, and two cores are to be busy.
# Hundreds of processes start, each of which would compile Triptych anew where bytecode may not be kept.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not chaos and not families and not vision and not quant" -n 3 --dist loadfile --no-loadscope-reorder

test-vision: $(VISION_READY)
	OMP_NUM_THREADS=1 $(VISION)/bin/python -m pytest -m "(vision or quant) and not gpu"

# What only a CUDA GPU shows, of which nothing else runs there. It takes the Python that has torch for that GPU, with
# Triptych and pytest installed: make test-gpu PYTHON=...
test-gpu:
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider

check: $(READY)
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_imports.py

# Kills, freezes and stops of every process in every state of a request.
chaos: $(READY)
	$(BIN)/python -m pytest -q tests/e2e/test_chaos.py

# Every family of models in real processes, each role from a folder with its own weights; and on two ranks in every way
# that docs/models.md names.
families: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "families and not vision" -n 2

# Twenty times the hostile frames of a normal test run, at each socket of a server and an instance.
fuzz: $(READY)
	TRIPTYCH_FUZZ_FRAMES=200000 $(BIN)/python -m pytest -q tests/e2e/test_fuzz.py --timeout 1200

# A hundred thousand simulated clusters, where a normal test run takes some three thousand. SEED=N goes on where an
# earlier run was stopped.
SEED ?= 0
soak: $(READY)
	$(BIN)/python -m triptych.sim --seed $(SEED) --count $$((100000 - $(SEED)))

bench: $(READY)
	$(BIN)/triptych bench control
	$(BIN)/triptych bench transfer
	$(BIN)/triptych bench serve tiny --shape 128x128x17 --bursts 1,2,4,8 --baseline replicas,stock

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch==2.13.0"
	$(BIN)/pip install -q -e ".[cpu,dev]"
	@/sbin/ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 \
		|| { test "$$(id -u)" = 0 && apt-get update && apt-get install -y libibverbs1; } \
		|| echo "Mooncake needs a system library: sudo apt-get install -y libibverbs1"
	touch $@

# torchvision is built for one version of torch and does not load beside another.
$(VISION_READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with make PYTHON=..."; exit 1; }
	test -x $(VISION)/bin/python || $(PYTHON) -m venv $(VISION)
	$(VISION)/bin/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch==2.14.1" "torchvision==0.29.1"
	$(VISION)/bin/pip install -q -e ".[cpu,dev,vision,quant]"
	touch $@
