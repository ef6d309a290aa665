# `make lab` opens the notebooks, `make test` proves them. Both install what they need into .venv, once.
# On Linux without an NVIDIA GPU, PyTorch's small CPU build saves gigabytes:
#   make lab TORCH_INDEX=https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
NBVAL := $(BIN)/python -m pytest --nbval --nbval-current-env --nbval-cell-timeout=120
DEVICE ?= cuda
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := lab
.PHONY: lab test test-gpu lint figures toy-model bench bench-explorers mutants clean help

lab: $(VENV)/lab.stamp  ## open JupyterLab on the first notebook (default)
	@$(BIN)/jupyter lab $(AS_ROOT) --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

# two workers with one thread each: more threads than cores would wait for one another
test: export OMP_NUM_THREADS := 1
test: lint  ## every test, every notebook, the browser tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/test_browser.py
	MINIMIND_DEVICE=cpu $(NBVAL) -n 2 --dist loadfile notebooks
	$(BIN)/python -m pytest tests/test_browser.py

test-gpu: $(VENV)/test.stamp  ## the same notebooks on an NVIDIA GPU
	MINIMIND_DEVICE=$(DEVICE) $(BIN)/python -c "import minimind_core; print('notebooks on', minimind_core.pick_device())"
	MINIMIND_DEVICE=$(DEVICE) $(NBVAL) notebooks

lint: $(VENV)/test.stamp  ## style of the code and the notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

figures: $(VENV)/lab.stamp  ## rebuild the static pictures
	$(BIN)/python figures/build.py

toy-model: $(VENV)/lab.stamp  ## train the two small models of the pictures anew (about half an hour)
	$(BIN)/python -m minimind_core.toy

bench: $(VENV)/test.stamp  ## speed and memory beside transformers
	$(BIN)/python tests/bench.py

bench-explorers: $(VENV)/test.stamp  ## key press to new picture, in a real browser
	$(BIN)/python tests/bench_explorers.py

mutants: $(VENV)/test.stamp  ## plant known faults, one at a time: each must be caught
	$(BIN)/python tests/mutants.py

clean:  ## remove .venv and caches; your progress stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

# ---------------------------------------------------------------- the environment

$(VENV)/lab.stamp: requirements.txt pyproject.toml .jupyter/overrides.json .jupyter/jupyter_server_config.py | $(BIN)/python
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install "$$(grep '^torch==' requirements.txt)" --index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -r requirements.txt -e .
	@mkdir -p $(VENV)/share/jupyter/lab/settings $(VENV)/etc/jupyter
	@cp .jupyter/overrides.json $(VENV)/share/jupyter/lab/settings
	@cp .jupyter/jupyter_server_config.py $(VENV)/etc/jupyter
	@touch $@

$(VENV)/test.stamp: tests/requirements.txt $(VENV)/lab.stamp
	$(BIN)/python -m pip install -r tests/requirements.txt
	@touch $@

$(BIN)/python:
	@found=; \
	for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	  version=$$($$python -c 'import sys; print(sys.version.split()[0])' 2>/dev/null) || continue; \
	  found="$$found $$python ($$version)"; \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue; \
	  if $$python -m venv $(VENV); then echo "Python $$version in $(VENV)"; exit 0; fi; \
	  rm -rf $(VENV); found="$$found without venv"; \
	done; \
	echo "The notebooks need Python 3.11 or newer. Found:$${found:- none}."; \
	echo "Install one from python.org or your package manager (Debian, Ubuntu: apt install python3 python3-venv),"; \
	echo "or name it: make lab PYTHON=/path/to/python3"; \
	exit 1
