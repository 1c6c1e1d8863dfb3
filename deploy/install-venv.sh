#!/bin/sh
# Debian keeps Python's venv module in a package of its own. Install it if we may, or say what to install.
set -eu
version=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q && apt-get install -y -q --no-install-recommends "$version"
else
    echo "this Python has no venv module: install it first, e.g. sudo apt-get install $version" >&2
    exit 2
fi
