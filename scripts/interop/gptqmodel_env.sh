#!/usr/bin/env bash
# An environment with GPTQModel, which clashes with our dependencies; tests read our gptq checkpoints in it. Made anew
# where what is pinned, or Python, has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-gptqmodel
pins=scripts/interop/gptqmodel_requirements.txt
python=${PYTHON:-python3}
made="$("$python" -V) $(sha256sum < "$pins")"
[ "$(cat "$environment/installed" 2> /dev/null)" = "$made" ] && exit
"$python" -m venv --clear "$environment"
pip=("$environment/bin/python" -m pip install --quiet --constraint "$pins")
# torch first: later steps keep the build that is there, and build against it
"${pip[@]}" torch setuptools wheel packaging ninja numpy
"${pip[@]}" --no-build-isolation gptqmodel transformers optimum # by which transformers finds it
echo "$made" > "$environment/installed"
