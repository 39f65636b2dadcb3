#!/bin/sh
# Installs Shardwright with versions that were tested together into a new virtual environment:
#     docker/install_shardwright.sh VENV EXTRAS
# EXTRAS are those of pyproject.toml, separated by commas. The environment has no pip.
set -eu

venv="$1"
extras="$2"
source="$(cd "$(dirname "$0")/.." && pwd)"

python3 -m venv --without-pip "$venv"
python3 -m pip --python "$venv/bin/python" install --quiet --no-cache-dir \
    --disable-pip-version-check --root-user-action ignore \
    --constraint "$source/docker/constraints.txt" "${source}[$extras]"
"$venv/bin/shardwright" --version
