#!/usr/bin/env bash
# over_tests.sh NAME [TESTS]: the environment .venv-NAME, which has NAME_requirements.txt over all that the environment of
# the tests has.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests="$PWD/${2:-.venv-test}"
environment=.venv-$1
[ -e "$environment/installed" ] && exit
"$tests/bin/python" -m venv --clear "$environment"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$tests/bin/python" -c "$site" > "$("$environment/bin/python" -c "$site")/tests.pth"
"$environment/bin/python" -m pip install --quiet --no-deps --requirement "scripts/interop/$1_requirements.txt"
touch "$environment/installed"
