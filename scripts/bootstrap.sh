#!/bin/sh
# Runs uv for this repository: `sh scripts/bootstrap.sh sync --locked` is `uv sync --locked` with a Python that fits.
# Needs a Python of at least 3.11 and nothing else. Where no uv is installed, the one that uv.lock names goes into
# .tools/, a private folder that git ignores. Nothing is ever installed outside this folder, and uv never downloads a
# Python of its own. `PYTHON=/path/to/python` chooses the interpreter.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
tools=$root/.tools

# The interpreter beneath an activated environment, not the environment's: that one may be what uv is about to replace.
probe='import sys
if sys.version_info < (3, 11): sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)'

python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    python=$("$candidate" -c "$probe" 2>/dev/null) && break
    python=
done
if [ -z "$python" ]; then
    echo "spanwire needs Python 3.11 or newer, and found none: tried ${PYTHON:-python3, python3.14 ... python3.11}." >&2
    echo "Install one (Debian, Ubuntu: apt install python3; macOS: brew install python) or name it: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
fi

# At least 0.8, like `required-version` in pyproject.toml.
recent() {
    version=$("$1" --version 2>/dev/null) || return 1
    version=${version#uv }
    minor=${version#*.}
    [ "${version%%.*}" -ge 1 ] 2>/dev/null || [ "${minor%%.*}" -ge 8 ] 2>/dev/null
}

by_venv() {
    "$python" -m venv "$tools/uv" && "$tools/uv/bin/python" -m pip install --disable-pip-version-check "uv==$pin"
}
by_pip() { # Debian and its like split venv off
    "$python" -m pip install --disable-pip-version-check --target "$tools/uv" "uv==$pin"
}
by_hand() { # and pip as well
    "$python" "$root/scripts/fetch_uv.py" "$root/uv.lock" "$tools/uv/bin/uv"
}

if recent uv; then
    uv=uv
else
    uv=$tools/uv/bin/uv
    if ! recent "$uv"; then
        pin=$(sed -n '/^name = "uv"$/{n;s/^version = "\(.*\)"$/\1/p;}' "$root/uv.lock")
        echo "No uv on this machine (0.8 or newer): putting uv $pin into .tools/" >&2
        mkdir -p "$tools"
        : >"$tools/bootstrap.log"
        for way in by_venv by_pip by_hand; do
            rm -rf "$tools/uv"
            $way >>"$tools/bootstrap.log" 2>&1 && recent "$uv" && break
        done
        if ! recent "$uv"; then
            cat "$tools/bootstrap.log" >&2
            echo "Could not install uv $pin (above: how it was tried). Is the network reachable? Or install uv yourself." >&2
            exit 1
        fi
    fi
fi

unset VIRTUAL_ENV # of whatever the caller has activated; ours are named below and in the Makefile
UV_PYTHON=$python
UV_PYTHON_DOWNLOADS=never
export UV_PYTHON UV_PYTHON_DOWNLOADS
# The machine's certificates where it has any, like pip and Python: behind a proxy that re-signs TLS, the ones that uv
# carries do not do. (The option's present and former name.)
if [ -n "$(ls /etc/ssl/certs 2>/dev/null)" ]; then
    UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true}
    UV_NATIVE_TLS=${UV_NATIVE_TLS:-true}
    export UV_SYSTEM_CERTS UV_NATIVE_TLS
fi
cd "$root"
exec "$uv" "$@"
