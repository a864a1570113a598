#!/usr/bin/env bash
# Make an environment from nothing, with pip, or uv where that is at hand. Every package is one of requirements/, checked
# by its hash. Repeatable; keeps an environment that works.
#
#   tools/bootstrap.sh dev .venv          holdfast, editable, with everything its tests and tools need
#   tools/bootstrap.sh base .venv-demo    what `pip install holdfast` brings; holdfast itself is run from src/
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

# pip 22.3 and later installs into another environment, which then needs no pip of its own: that saves seconds.
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
# The file is closed: it lists all that its packages depend on.
install --no-deps --require-hashes --requirement "requirements/$set.txt"
if [ "$set" = dev ]; then
    # Hashes and an editable project do not go together in one call. Its build tool is among the pinned packages.
    install --no-deps --no-build-isolation --editable .
fi
