#!/usr/bin/env bash
# Fetches the libraries of the chat page from the npm registry into gateway/page/vendor/, at the
# versions and with the checksums of its SOURCES.txt. To update one, change its lines there.
set -euo pipefail
root=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/gateway/page/vendor
check=(sha256sum)
command -v sha256sum >/dev/null || check=(shasum -a 256) # macOS
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

while read -r sum file package version source; do
    case $sum in '' | '#'*) continue ;; esac
    unpacked=$scratch/$package-$version
    if [ ! -d "$unpacked" ]; then
        mkdir -p "$unpacked"
        url=https://registry.npmjs.org/$package/-/${package##*/}-$version.tgz
        curl --fail --silent --show-error --location "$url" | tar -xz -C "$unpacked" --strip-components=1
    fi
    if ! printf '%s  %s\n' "$sum" "$unpacked/$source" | "${check[@]}" --check --status; then
        echo "vendor.sh: $source of $package $version has another checksum than SOURCES.txt says" >&2
        exit 1
    fi
    mkdir -p "$(dirname -- "$target/$file")"
    cp "$unpacked/$source" "$target/$file"
done <"$target/SOURCES.txt"
echo "vendor: $target is complete"
