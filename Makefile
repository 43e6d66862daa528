# Every target makes the environment it needs, or reuses it. Needs Python 3.11 and pip.
#   make demo               a real quantized model: generate, save, start from the saved state, compare
#   make test               the tests (all but the full matrix and those for a GPU)
#   make test-all           the full matrix as well
#   make bench              reading and writing, side by side with others (6 GB in .cache/bench, minutes)
#   make lint               ruff, mypy
# ARGS is handed on: make test ARGS="-k kv_scales", make demo ARGS="--model gemma-w8a8-kv".
PYTHON ?= python3.11
ARGS ?=

.PHONY: demo test test-all bench lint clean
demo test test-all bench lint:
	@PYTHON="$(PYTHON)" bash tools/task.sh $@ $(ARGS)

clean:
	rm -rf .venv .venv-bench .venv-quantize .cache .pytest_cache .ruff_cache .mypy_cache build *.egg-info
