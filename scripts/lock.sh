#!/usr/bin/env bash
# Resolves requirements/*.in into hashed locks. One lock serves every architecture and every
# supported Python of its platform, so this also checks that each of them has all the wheels.
# With --outdated it changes nothing: it lists the locked packages that have a newer version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"

uv=${UV:-uv}
[ -n "${UV:-}" ] || [ ! -x ../venv/bin/uv ] || uv=../venv/bin/uv # that of dev.lock
command -v "$uv" >/dev/null || {
    echo "lock.sh: uv is missing: run ./install.sh --dev, or name it with UV=/path/to/uv" >&2
    exit 1
}
# Matches the oldest macOS that the mlx wheels are built for.
export MACOSX_DEPLOYMENT_TARGET=14.0
pythons="3.11 3.12 3.13 3.14"

# Dependencies that packages declare but that serving does not need: grpcio-tools never imports
# setuptools, and mlx-vlm and mlx-audio use the others only to train, to record, to run their own
# servers, or for models that are not served.
unneeded=(setuptools cryptography datasets pandas pyarrow dill multiprocess xxhash
    python-dateutil tzdata sounddevice miniaudio fastapi starlette uvicorn opentelemetry-api
    python-multipart websockets opencv-python scipy)
without=("${unneeded[@]/#/--no-emit-package=}")

outdated() { # LOCK PLATFORM: prints "NAME VERSION -> NEWEST" lines
    local locked newest
    locked=$(sed -n 's/^\([a-z0-9._-]*\)==\([^ ;]*\).*/\1 \2/p' "$1" | sort)
    newest=$(cut -d ' ' -f 1 <<<"$locked" | "$uv" pip compile --quiet --no-deps --no-header \
        --no-annotate --no-config --python-version 3.11 --python-platform "$2" - |
        sed 's/==/ /' | sort)
    join <(echo "$locked") <(echo "$newest") | awk '$2 != $3 { print $1, $2, "->", $3 }'
}

pinned_in() { # NAME: " (pinned in FILE…)", if a .in file names a version
    local files
    files=$(grep -lE "^$1(\[[a-z0-9,-]*\])?==" ./*.in | sed 's|^\./||' | paste -sd ' ')
    [ -z "$files" ] || echo " (pinned in requirements/$files)"
}

resolve() { # IN LOCK PLATFORM [UV OPTION…]
    local source=$1 lock=$2 platform=$3
    shift 3
    echo "lock: $lock"
    "$uv" pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-config \
        --only-binary :all: --python-version 3.11 --python-platform "$platform" \
        --custom-compile-command "make lock" "$@" --output-file "$lock" "$source"
}

check() { # LOCK PLATFORM
    local lock=$1 platform=$2 python scratch
    scratch=$(mktemp -d)
    for python in $pythons; do
        echo "check: $lock on $platform, Python $python"
        "$uv" pip install --quiet --dry-run --no-deps --no-config --only-binary :all: \
            --require-hashes --target "$scratch" --python-version "$python" \
            --python-platform "$platform" -r "$lock"
    done
    rm -rf "$scratch"
}

linux_x86=x86_64-manylinux_2_35
linux_arm=aarch64-manylinux_2_35
mac=aarch64-apple-darwin

if [ "${1:-}" = --outdated ]; then
    {
        for lock in linux-cpu linux-cuda12 linux-cuda13 gateway dev fuzz clients; do
            outdated "$lock.lock" "$linux_x86"
        done
        outdated macos-metal.lock "$mac"
    } | sort -u | while read -r name change; do
        echo "$name $change$(pinned_in "$name")"
    done
    exit
fi

for profile in linux-cpu linux-cuda12 linux-cuda13; do
    resolve "$profile.in" "$profile.lock" "$linux_x86" "${without[@]}"
    check "$profile.lock" "$linux_x86"
    check "$profile.lock" "$linux_arm"
done
resolve macos-metal.in macos-metal.lock "$mac" "${without[@]}"
check macos-metal.lock "$mac"

# The constraints keep what the locks below have pinned already; they are installed together.
resolve gateway.in gateway.lock "$linux_x86" --constraint linux-cpu.lock
# selenium works without these. httpcore imports trio if it is installed, which delays the start of
# every process that loads a model or serves HTTP.
resolve dev.in dev.lock "$linux_x86" --constraint linux-cpu.lock --constraint gateway.lock \
    --no-emit-package={trio,trio-websocket,outcome,sniffio,wsproto}
for lock in gateway.lock dev.lock; do
    for platform in "$linux_x86" "$linux_arm" "$mac"; do
        check "$lock" "$platform"
    done
done

resolve fuzz.in fuzz.lock "$linux_x86"

# Not checked for wheels: some clients have only a source package, and only the tests need them.
resolve clients.in clients.lock "$linux_x86" \
    --no-binary sqlitedict --no-binary rouge-score --no-binary word2number
