"""`make fuzz`: 100,000 inputs for every target. FUZZ="--runs 1000 gbnf chat" chooses others.

A failing input is left in build/fuzz/TARGET: copied to tests/fuzz/corpus/TARGET, it becomes a test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build" / "fuzz"
SITE = FOUND / "site"
LOCK = ROOT / "requirements" / "fuzz.lock"
RUNS = 100_000


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make fuzz", usage='make fuzz FUZZ="[--runs N] [TARGET…]"'
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="inputs per target (%(default)s)")
    names = f"all without one: {', '.join(TARGETS)}"
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=names)
    asked = parser.parse_args(arguments)
    _install()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SITE)))}
    failed = []
    for name in asked.targets or TARGETS:
        folder = str(FOUND / name)
        command = [sys.executable, "-m", "tests.fuzz.guided", name, str(asked.runs), folder]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environ)
        lines = done.stderr.splitlines()
        print(f"{name}: {lines[-1] if lines else 'no output'}", flush=True)
        if done.returncode:
            print("\n".join(lines[-60:]), flush=True)
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "no target failed")
    return bool(failed)


def _install() -> None:
    """Install atheris where only the fuzzed processes find it."""
    if not (SITE / "atheris").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes"]
        subprocess.run([*pip, "--target", str(SITE), "-r", str(LOCK)], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
