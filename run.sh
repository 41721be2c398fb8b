#!/bin/bash
# Starts the backend: ./run.sh --addr HOST:PORT. Replaces itself with Python, so that the host
# that started it is Python's parent and its signals reach Python.
set -eu
trap '' USR1 USR2 # while Python starts, they would end the process

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do
    target=$(readlink "$script")
    case $target in
        /*) script=$target ;;
        *) script=${script%/*}/$target ;;
    esac
done
case $script in
    */*) ;;
    *) script=./$script ;;
esac
root=$(CDPATH='' cd -P -- "${script%/*}/" && pwd)

. "$root/scripts/environment.sh"
exec "${launch[@]}" -m backend "$@"
