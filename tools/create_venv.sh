#!/usr/bin/env bash
# Make a virtual environment with a Python that is new enough: create_venv.sh FOLDER [PYTHON]
# A working environment is kept with its packages, unless PYTHON is given: then it is created again.
set -euo pipefail
folder=$1
asked=${2:-}
enough='import sys; sys.exit(sys.version_info < (3, 11))'
found=

if [[ -z $asked && -x $folder/bin/python ]] && "$folder/bin/python" -m pip --version >/dev/null 2>&1 &&
    "$folder/bin/python" -c "$enough"; then
    echo "Using $folder, which exists ($("$folder/bin/python" --version)); to create it again, run make clean first"
    exit 0
fi

# A name on the path need not run (version managers leave such names behind), so each candidate is tried.
for candidate in ${asked:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c "$enough" 2>/dev/null; then
        found=$candidate
        break
    fi
done

if [[ -z $found ]]; then
    have=$("${asked:-python3}" --version 2>/dev/null || echo "no working ${asked:-python3}")
    echo "error: Python 3.11 or later is needed; found: $have." >&2
    echo "Install one, or name it: make PYTHON=/path/to/python3.12 …" >&2
    exit 1
fi

if ! "$found" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "error: $("$found" --version) ($found) comes without the modules venv and ensurepip;" >&2
    echo "install them (Debian and Ubuntu: the package python3-venv), or name another Python: make PYTHON=…" >&2
    exit 1
fi

echo "Creating $folder with $("$found" --version) …"
"$found" -m venv --clear "$folder"
