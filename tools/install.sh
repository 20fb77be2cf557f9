#!/usr/bin/env bash
# Install packages into a virtual environment: tools/install.sh FOLDER ARGUMENTS-OF-PIP-INSTALL...
# uv takes a fifth of pip's time, and all environments share its cache. It searches the folders of wheels that pip is
# configured to search. Where uv cannot be installed or does not find a package, pip installs.
set -euo pipefail
python=$1/bin/python
shift
"$python" -m uv --version > /dev/null 2>&1 || "$python" -m pip install --quiet --disable-pip-version-check uv || true
export UV_FIND_LINKS=${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2> /dev/null || true)}
"$python" -m uv pip install --quiet --python "$python" "$@" ||
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
