#!/usr/bin/env bash
# An environment with lm-evaluation-harness over that of the tests; with scikit-learn there, transformers takes more
# memory than the tests of memory expect.
exec bash "$(dirname "$0")/over_tests.sh" lm_eval "$@"
