#!/usr/bin/env bash
# An environment with onnxruntime-genai over that of the tests, whose transformers its model builder takes.
exec bash "$(dirname "$0")/over_tests.sh" onnxruntime_genai "$@"
