#!/usr/bin/env bash
# An environment with GPTQModel, which clashes with our dependencies; tests read our gptq checkpoints in it.
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-gptqmodel
[ -e "$environment/installed" ] && exit
"${PYTHON:-python3}" -m venv --clear "$environment"
# torch first: later steps keep the build that is there, and build against it
"$environment/bin/python" -m pip install --quiet torch==2.13.0 setuptools wheel packaging ninja numpy
"$environment/bin/python" -m pip install --quiet --no-build-isolation gptqmodel==7.6.0 transformers==5.23.0
touch "$environment/installed"
