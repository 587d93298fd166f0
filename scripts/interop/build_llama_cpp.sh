#!/usr/bin/env bash
# Builds llama.cpp's command line tools into DIR/bin, from the source inside the sdist of llama-cpp-python.
#
#   scripts/interop/build_llama_cpp.sh DIR [JOBS]
#
# Needs pip, cmake and a C++ compiler. Does nothing where the tools of this version are there already.
set -euo pipefail

version=0.3.36
tools=(llama-quantize llama-imatrix llama-perplexity llama-completion)

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 DIR [JOBS]" >&2
    exit 2
fi
mkdir -p "$1"
dir=$(cd "$1" && pwd)
jobs=${2:-1}

if [ "$(cat "$dir/built" 2>/dev/null)" = "$version ${tools[*]}" ]; then
    echo "$dir/bin holds the tools of llama-cpp-python $version"
    exit 0
fi
for program in pip cmake c++; do
    command -v "$program" >/dev/null || { echo "$program is not installed" >&2; exit 1; }
done

sdist=$dir/llama_cpp_python-$version.tar.gz
source=$dir/source
if [ ! -f "$sdist" ]; then
    pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$dir" "llama-cpp-python==$version"
fi
if [ ! -f "$source/CMakeLists.txt" ]; then
    rm -rf "$source.part"
    mkdir "$source.part"
    tar -xzf "$sdist" -C "$source.part" --strip-components=3 "llama_cpp_python-$version/vendor/llama.cpp"
    rm -rf "$source"
    mv "$source.part" "$source"
fi

cmake -S "$source" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_OPENSSL=OFF
cmake --build "$dir/build" --parallel "$jobs" --target "${tools[@]}"

mkdir -p "$dir/bin"
for tool in "${tools[@]}"; do
    cp "$dir/build/bin/$tool" "$dir/bin/$tool"
    "$dir/bin/$tool" --help >/dev/null 2>&1 || [ $? -eq 1 ] || { echo "$dir/bin/$tool does not start" >&2; exit 1; }
done
echo "$version ${tools[*]}" >"$dir/built"
