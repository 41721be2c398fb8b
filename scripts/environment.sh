# shellcheck shell=bash
# Sourced by run.sh and scripts/python with `root` set to the directory that holds them: sets
# `launch` to the command that starts Python in this project's environment. It uses only shell
# builtins, because it delays the first answer of the process.

venv=${ENV_DIR:-$root}/venv
if [ -x "$root/python/bin/python3" ]; then # made by `make package`
    python=$root/python/bin/python3
elif [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
else
    echo "${0##*/}: no virtual environment at $venv: run ${root}/install.sh first" >&2
    exit 1
fi

if [ -d "$root/lib" ]; then
    export LD_LIBRARY_PATH="$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

launch=("$python" -I -S "$root/common/launch.py")
