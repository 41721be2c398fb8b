"""What a run of the tests left out because this machine lacks a program, as one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# A word of the reason for which tests are skipped, and how to get what they lack.
REMEDIES = {
    "chromedriver": "a browser (apt-get install chromium chromium-driver)",
    "npm": "npm (apt-get install npm)",
    "grpcurl": "grpcurl (go install github.com/fullstorydev/grpcurl/cmd/grpcurl@latest)",
    "systemd-analyze": "systemd-analyze (apt-get install systemd)",
    "aarch64-linux-gnu-gcc": "a compiler for ARM (apt-get install gcc-aarch64-linux-gnu)",
    "qemu": "qemu (apt-get install qemu-user)",
    "C++ compiler": "a C++ compiler (apt-get install g++)",
    "setpriv": "root and setpriv (apt-get install util-linux)",
    "make test-long": "time (make test-long)",
    "could not be installed": "packages of PyPI or npm (is there a network?)",
}


def left_out(reasons: Iterable[str]) -> str:
    """The line for tests that were skipped for these reasons; "" if there is nothing to say."""
    lacking: Counter[str] = Counter()
    others = 0
    for reason in reasons:
        remedy = next((REMEDIES[word] for word in REMEDIES if word in reason), None)
        if remedy is None:
            others += 1
        else:
            lacking[remedy] += 1
    parts = [f"{count} for lack of {remedy}" for remedy, count in lacking.most_common()]
    if others:
        parts.append(f"{others} for other reasons (listed above)")
    return f"Skipped: {'; '.join(parts)}" if parts else ""
