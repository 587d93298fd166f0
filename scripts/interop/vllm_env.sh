#!/usr/bin/env bash
# An environment with vLLM for CPUs, which clashes with our dependencies; tests load our checkpoints in it.
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-vllm
[ -e "$environment/installed" ] && exit
"${PYTHON:-python3}" -m venv --clear "$environment"
"$environment/bin/python" -m pip install --quiet torch==2.13.0
# the list lacks what vLLM asks for beside: sounds, pictures and services
"$environment/bin/python" -m pip install --quiet --no-deps --requirement scripts/interop/vllm_requirements.txt
touch "$environment/installed"
