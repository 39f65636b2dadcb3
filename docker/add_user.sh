#!/bin/sh
# Adds the user that the service runs as, and the folder that it writes to:
#     docker/add_user.sh NAME UID FOLDER
set -eu

name="$1"
uid="$2"
folder="$3"

if ! getent passwd "$name" >/dev/null; then
    groupadd --gid "$uid" "$name"
    useradd --uid "$uid" --gid "$uid" --home-dir "$folder" --no-create-home \
        --shell /usr/sbin/nologin "$name"
fi
install --directory --owner "$name" --group "$name" --mode 0750 "$folder"
