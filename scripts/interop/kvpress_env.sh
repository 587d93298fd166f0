#!/usr/bin/env bash
# An environment with kvpress over that of the tests; it asks for an older transformers, and runs with this one.
exec bash "$(dirname "$0")/over_tests.sh" kvpress "$@"
