#!/usr/bin/env bash
# over_tests.sh NAME [TESTS]: the environment .venv-NAME, which has NAME_requirements.txt over all that the environment of
# the tests has. Made anew where either has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests="$PWD/${2:-.venv-test}"
environment=.venv-$1
requirements=scripts/interop/$1_requirements.txt
site='import sysconfig; print(sysconfig.get_path("purelib"))'
below=$("$tests/bin/python" -c "$site")
made="$below $(sha256sum < "$requirements")"
[ "$(cat "$environment/installed" 2> /dev/null)" = "$made" ] && exit
"$tests/bin/python" -m venv --clear "$environment"
echo "$below" > "$("$environment/bin/python" -c "$site")/tests.pth"
"$environment/bin/python" -m pip install --quiet --no-deps --requirement "$requirements"
echo "$made" > "$environment/installed"
