# Everything a developer or a newcomer runs. Needs git, make and Python >= 3.11; each target makes .venv when missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CROSS := .venv-cross
EXTRAS := mujoco,minari,plot,hpo,ray,onnx,tensorboard,dev
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: demo test test-slow test-cross check bench docs clean

demo: $(VENV)/.installed
	$(BIN)/refplan demo

# In two processes, because a test's time is one thread's; a single file: .venv/bin/python -m pytest tests/test_x.py
test: $(VENV)/.installed
	$(BIN)/python -m tests.together

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# The real stable-baselines3, d3rlpy and torch live apart: the package itself never needs them.
test-cross: $(CROSS)/.installed
	$(CROSS)/bin/python -m pytest tests/cross tests/test_external.py tests/test_torch_file.py tests/test_policy.py

check: $(VENV)/.installed
	$(BIN)/ruff format --check refplan tests benchmarks
	$(BIN)/ruff check refplan tests benchmarks
	$(BIN)/ty check --error-on-warning --output-format concise
	$(BIN)/python -m pytest tests/test_layers.py

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Reinstalled whenever the dependencies or the pinned versions change.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "refplan needs Python >= 3.11; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[docs]'
	touch $@

$(CROSS)/.installed: pyproject.toml constraints.txt constraints-cross.txt
	test -x $(CROSS)/bin/python || $(PYTHON) -m venv $(CROSS)
	$(CROSS)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints-cross.txt torch
	$(CROSS)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints-cross.txt \
		stable-baselines3 d3rlpy jax equinox optax jaxtyping h5py safetensors rich pytest beartype hypothesis onnx onnxruntime
	$(CROSS)/bin/python -m pip install $(PIP_FLAGS) --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(CROSS) site dist
