#!/usr/bin/env bash
# Create a virtual environment with the GPU machine's versions (environment.txt): tools/gpu/environment.sh FOLDER
# Prefers Python 3.12, then 3.13, 3.14, 3.11. This PyTorch includes CUDA's libraries, 5 GB on disk; it does not load
# without them, even on a machine without a GPU.
set -euo pipefail
folder=$1
here=$(cd "$(dirname "$0")" && pwd)
find_python() {
    local version path
    for version in 3.12 3.13 3.14 3.11; do
        for path in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
            if "$path" -c 'import venv, ensurepip' 2>/dev/null; then
                echo "$path"
                return
            fi
        done
    done
    echo "Python 3.11 or newer was not found" >&2
    return 1
}
test -x "$folder/bin/python" || "$(find_python)" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/environment.txt"
"$folder/bin/python" -c 'import sys, torch, triton; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")'
