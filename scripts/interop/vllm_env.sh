#!/usr/bin/env bash
# An environment with vLLM for CPUs, which clashes with our dependencies; tests load our checkpoints in it. Made anew where
# what is pinned, or Python, has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=.venv-vllm
pins=scripts/interop/vllm_requirements.txt
python=${PYTHON:-python3}
made="$("$python" -V) $(sha256sum < "$pins")"
[ "$(cat "$environment/installed" 2> /dev/null)" = "$made" ] && exit
"$python" -m venv --clear "$environment"
"$environment/bin/python" -m pip install --quiet torch==2.13.0
# the list lacks what vLLM asks for beside: sounds, pictures and services
"$environment/bin/python" -m pip install --quiet --no-deps --requirement "$pins"
echo "$made" > "$environment/installed"
