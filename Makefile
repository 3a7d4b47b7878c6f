# Two commands a newcomer needs: `make demo` and `make test`. Each sets up all it needs in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# What a test run may use at once.
JOBS   ?= auto

.PHONY: demo test check unit real lowest bench clean

demo: $(VENV)/ready  ## three fake workers with a scripted life, and the exporter watching them
	$(BIN)/python examples/demo.py

test: check unit  ## everything that runs without the genuine vllm-rs

check: $(VENV)/ready  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

unit: $(VENV)/ready
	$(BIN)/pytest -m "not real and not slow" -n $(JOBS)

real: $(VENV)/ready  ## against the genuine vllm-rs of three vLLM versions (fetched once, about 1 GB of wheels)
	$(BIN)/python -m tests.real.fetch
	VLLM_CP_REQUIRE_REAL=1 $(BIN)/pytest -m "real and not slow" -n $(JOBS)

lowest: .venv-lowest/ready  ## the oldest grpcio and protobuf we support
	.venv-lowest/bin/pytest -m "not real and not slow" -n $(JOBS) tests/unit tests/wire tests/inprocess

bench: $(VENV)/ready
	$(BIN)/python -m bench

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

.venv-lowest/ready: pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade pip
	.venv-lowest/bin/python -m pip install --quiet --editable '.[test]' 'grpcio==1.62.*' 'protobuf==4.25.*' 'click==8.1.*'
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest
