#!/usr/bin/env bash
# Creates a directory with run.sh at its root and everything that it needs. The directory can be
# moved or copied, because nothing in it points back here; only venv/bin/python3 is a link to this
# machine's interpreter, unless a portable interpreter in python/ is included.
set -euo pipefail
root=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:?usage: scripts/package.sh DIRECTORY}
venv=${ENV_DIR:-$root}/venv

if [ -e "$target" ] && [ ! -x "$target/run.sh" ] && [ -n "$(ls -A "$target")" ]; then
    echo "package.sh: $target exists and is no package: name another PACKAGE_DIR, or remove it" >&2
    exit 1
fi

mkdir -p "$(dirname -- "$target")"
staging=$(mktemp -d "$(dirname -- "$target")/.package.XXXXXX")
trap 'rm -rf "$staging"' EXIT
chmod 755 "$staging"

echo "package: copying into $target"
cp -R "$root/run.sh" "$root/install.sh" "$root/backend.proto" "$root/backend" "$root/common" \
    "$root/wire" "$root/requirements" "$staging/"
mkdir "$staging/scripts"
cp "$root/scripts/environment.sh" "$root/scripts/python" "$staging/scripts/"
for optional in lib python LICENSE README.md; do
    [ ! -e "$root/$optional" ] || cp -R "$root/$optional" "$staging/"
done
cp -R "$venv" "$staging/venv"

# What only the gateway, tests and lint need stays behind; the stamp must say so, for an install.sh
# over there.
names() { grep -ohE '^[a-z0-9-]+==' "$@" | tr -d '=' | sort -u; }
profile=$(sed -n 's/^profile //p' "$venv/.installed")
extra_locks=$(sed -nE "s#^(gateway|dev) .*#$root/requirements/\1.lock#p" "$venv/.installed")
if [ -n "$extra_locks" ]; then
    # shellcheck disable=SC2086 # a path a line
    (IFS=$'\n' && comm -23 <(names $extra_locks) <(names "$root/requirements/$profile.lock")) |
        xargs "$staging/venv/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check --root-user-action=ignore
    sed -E '/^(gateway|dev) /d' "$venv/.installed" >"$staging/venv/.installed"
fi

# Compiled code stays for the packages in venv/, which nobody edits; ours is compiled on its first
# start, if the place is writable.
find "$staging/backend" "$staging/common" "$staging/wire" -name __pycache__ -type d -prune -exec rm -rf {} +
# Three names of one file arrive as three copies; the dynamic linker asks for this one.
find "$staging/venv" \( -path '*/cmeel.prefix/lib/libopenblas.so' -o -path '*/cmeel.prefix/lib/libopenblas.so.0.3' \) -delete

rm -rf "$target"
mv "$staging" "$target"
trap - EXIT
echo "package: $target ($(du -sh "$target" | cut -f1)) is ready: local-ai backends install $(CDPATH='' cd -P -- "$target" && pwd) mlx-backend mlx"
