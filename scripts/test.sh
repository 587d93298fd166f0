#!/usr/bin/env bash
# Lint, types and every test, in an environment of its own with pinned versions.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the same modules

# environments are made beside one another and beside what reads the source: most of their time is that of one core
bash scripts/interop/gptqmodel_env.sh &
other=$!
trap 'kill $(jobs -p) 2> /dev/null || true' ERR

environment=.venv-test
rm -rf "$environment"
"${PYTHON:-python3}" -m venv "$environment"
bin="$PWD/$environment/bin"
"$bin/python" -m pip install --quiet --upgrade pip
"$bin/python" -m pip install --quiet --constraint constraints.txt torch
"$bin/python" -m pip install --quiet --constraint constraints.txt --editable '.[test,interop,dev,docs]' nvidia-cuda-nvrtc

(for name in lm_eval kvpress onnxruntime_genai; do bash "scripts/interop/${name}_env.sh"; done) &
over_tests=$!
"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
wait "$over_tests"
wait "$other"
"$bin/pytest" -n 2 --dist worksteal -q -m '' --durations 60 --durations-min 10
