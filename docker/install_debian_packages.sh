#!/bin/sh
# Installs Debian packages that are not there yet: docker/install_debian_packages.sh NAME...
# The image and continuous integration install by this script alike.
set -eu

missing=""
for name in "$@"; do
    if ! dpkg-query --show --showformat '${Status}' "$name" 2>/dev/null | grep -q '^install ok'; then
        missing="$missing $name"
    fi
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "error: this system has no apt-get; install by its own means:$missing" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "error: only root can install packages; as root, run: $0$missing" >&2
    exit 1
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
# shellcheck disable=SC2086  # names of packages have no spaces
apt-get install --quiet=2 --yes --no-install-recommends $missing
apt-get clean
