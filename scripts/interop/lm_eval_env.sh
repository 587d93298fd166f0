#!/usr/bin/env bash
# An environment with lm-evaluation-harness over that of the tests; with scikit-learn there, transformers takes more
# memory than the tests of memory expect.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests="$PWD/${1:-.venv-test}"
environment=.venv-lm_eval
[ -e "$environment/installed" ] && exit
"$tests/bin/python" -m venv --clear "$environment"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$tests/bin/python" -c "$site" > "$("$environment/bin/python" -c "$site")/tests.pth"
"$environment/bin/python" -m pip install --quiet --no-deps --requirement scripts/interop/lm_eval_requirements.txt
touch "$environment/installed"
