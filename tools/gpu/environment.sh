#!/usr/bin/env bash
# Create an empty virtual environment with the GPU machine's Python, if it is not there: tools/gpu/environment.sh FOLDER
# Prefers Python 3.12, then 3.13, 3.14, 3.11.
set -euo pipefail
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
test -x "$1/bin/python" || "$(find_python)" -m venv "$1"
