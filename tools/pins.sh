#!/usr/bin/env bash
# Write requirements/: every dependency, pinned, with the hashes of all its files, for every supported Python and
# platform. Versions that are pinned already stay; `make pins ARGS=--upgrade` (or `--upgrade-package NAME`) moves them.
# Where packages come from is left to this machine's settings.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if ! uv=$(command -v uv); then
    "${PYTHON:-python3}" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    uv=$folder/venv/bin/uv
fi

compile() {
    local name=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
        --no-emit-find-links --custom-compile-command 'make pins' --output-file "requirements/$name.txt" "$@"
}

mkdir -p requirements
compile dev pyproject.toml --extra dev "$@"
# Parts of the same set: what the tests need on other Pythons, and the base install.
compile test pyproject.toml --extra test --constraint requirements/dev.txt
compile base pyproject.toml --constraint requirements/dev.txt
