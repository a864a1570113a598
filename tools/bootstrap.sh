#!/usr/bin/env bash
# Create a virtual environment with uv, or with pip if uv is not installed. Every package is pinned in requirements/ and
# checked by its hash. Can be repeated; keeps a working environment.
#
#   tools/bootstrap.sh dev .venv          holdfast, editable, with the packages for its tests and tools
#   tools/bootstrap.sh base .venv-demo    the packages of `pip install holdfast`; holdfast itself is run from src/
set -euo pipefail
cd "$(dirname "$0")/.."

set=$1
venv=$2
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

# pip 22.3 and later can install into another environment, which then needs no pip itself: that saves seconds.
has_pip() { "$python" -m pip --python "$python" --version >/dev/null 2>&1; }

make_venv() {
    say "creating $venv with $python"
    rm -rf "$venv"
    if [ "$set" = base ] && { command -v uv >/dev/null || has_pip; }; then
        "$python" -m venv --without-pip "$venv"
    else
        "$python" -c 'import ensurepip, venv' 2>/dev/null || install_debian python3-venv
        "$python" -m venv "$venv"
    fi
}

install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    elif [ "$set" = base ] && has_pip; then
        # Not compiled: most of its modules are never loaded.
        "$python" -m pip --python "$venv" install --quiet --disable-pip-version-check --no-compile "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

if [ -z "$python" ]; then
    install_debian python3 python3-venv
    python=$(command -v python3)
fi
if ! recent "$python"; then
    say "holdfast needs Python 3.11 or later; $python is $("$python" --version 2>&1). Set PYTHON=… to another one."
    exit 1
fi
recent "$venv/bin/python" || make_venv

say "installing requirements/$set.txt into $venv"
# The file is complete: it lists all dependencies of its packages.
install --no-deps --require-hashes --requirement "requirements/$set.txt"
if [ "$set" = dev ]; then
    # One call cannot combine hashes and an editable project. Its build tool is one of the pinned packages.
    install --no-deps --no-build-isolation --editable .
fi
