# shellcheck shell=bash
# Sourced by run.sh and scripts/python with `root` set to the directory that holds them: sets
# `python` and the environment in which it runs. Only builtins, because it is part of the time
# from the start of the process to its first answer.

venv=${ENV_DIR:-$root}/venv
python=$venv/bin/python
if [ ! -x "$python" ]; then
    echo "${0##*/}: no virtual environment at $venv: run ${root}/install.sh first" >&2
    exit 1
fi

# A venv records where its interpreter lives. When that interpreter travels along in python/,
# the record goes stale as soon as the directory is moved.
if [ -x "$root/python/bin/python3" ]; then
    config='' home=''
    while IFS= read -r line; do
        case $line in
            "home = "*)
                home=${line#home = }
                line="home = $root/python/bin"
                ;;
        esac
        config=$config$line$'\n'
    done <"$venv/pyvenv.cfg"
    if [ "$home" != "$root/python/bin" ]; then
        if ! { printf '%s' "$config" >"$venv/pyvenv.cfg.$$" && mv -f "$venv/pyvenv.cfg.$$" "$venv/pyvenv.cfg"; }; then
            echo "${0##*/}: $venv/pyvenv.cfg names an interpreter in $home and cannot be changed: make $venv writable" >&2
            exit 1
        fi
    fi
fi

unset PYTHONHOME
export PYTHONPATH="$root" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1

if [ -d "$root/lib" ]; then
    export LD_LIBRARY_PATH="$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

# install.sh makes this folder for Linux CPU only. The library goes by its bare name because the
# dynamic linker splits LD_PRELOAD at spaces, which a path may contain. The *_BEFORE variables
# let the process give its own children the environment it was started with.
openblas=$venv/lib/openblas
if [ -e "$openblas/libopenblas.so.0" ]; then
    case ${MLX_BACKEND_OPENBLAS:-1} in
        0 | [oO][fF][fF] | [nN][oO] | [fF][aA][lL][sS][eE]) ;;
        *)
            export MLX_BACKEND_LD_PRELOAD_BEFORE="${LD_PRELOAD:-}"
            export MLX_BACKEND_LD_LIBRARY_PATH_BEFORE="${LD_LIBRARY_PATH:-}"
            export LD_PRELOAD="libopenblas.so.0${LD_PRELOAD:+:$LD_PRELOAD}"
            export LD_LIBRARY_PATH="$openblas${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
            ;;
    esac
fi
