#!/usr/bin/env bash
# Make .venv from nothing: Python's own venv, or uv where that is at hand; then holdfast itself, editable,
# with everything pinned by constraints.txt. Repeatable; keeps a .venv that works.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

say() { printf '%s\n' "$*" >&2; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

install_debian() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        say "missing: $*. Install it (Debian: apt-get install $*) and run make again."
        exit 1
    fi
    say "installing Debian's $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

if [ -z "$python" ]; then
    install_debian python3 python3-venv
    python=$(command -v python3)
fi
if ! recent "$python"; then
    say "holdfast needs Python 3.11 or later; $python is $("$python" --version 2>&1). Set PYTHON=… to another one."
    exit 1
fi

if ! recent "$venv/bin/python"; then
    say "creating $venv with $python"
    rm -rf "$venv"
    if command -v uv >/dev/null && uv venv --quiet --seed --python "$python" "$venv"; then
        :
    else
        "$python" -c 'import ensurepip, venv' 2>/dev/null || install_debian python3-venv
        "$python" -m venv "$venv"
    fi
fi

say "installing holdfast and its tools into $venv"
if command -v uv >/dev/null; then
    uv pip install --quiet --python "$venv/bin/python" --constraint constraints.txt --editable '.[dev]'
else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
fi
