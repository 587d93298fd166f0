#!/usr/bin/env bash
# An environment with kvpress over that of the tests; it asks for an older transformers, and runs with this one.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests="$PWD/${1:-.venv-test}"
environment=.venv-kvpress
[ -e "$environment/installed" ] && exit
"$tests/bin/python" -m venv --clear "$environment"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$tests/bin/python" -c "$site" > "$("$environment/bin/python" -c "$site")/tests.pth"
"$environment/bin/python" -m pip install --quiet --no-deps --requirement scripts/interop/kvpress_requirements.txt
touch "$environment/installed"
