"""The examples in CONTRIBUTING.md pick tests that exist."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.install.shell import ROOT, clean_environment, shell

EXAMPLES = re.findall(
    r'make (test|test-long) TESTS="([^"]+)"', (ROOT / "CONTRIBUTING.md").read_text()
)
NEW_FAMILY = "locateanything"  # stands for NAME: a family of test_families.FAMILIES, not of SAMPLE


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(("target", "tests"), EXAMPLES)
def test_each_example_picks_tests(target: str, tests: str) -> None:
    long = "1" if target == "test-long" else ""
    arguments = shlex.split(tests.replace("NAME", NEW_FAMILY))
    if "-k" not in arguments:
        assert all((ROOT / path).exists() for path in arguments)
        return
    collecting = (ROOT / "scripts" / "python", "-m", "pytest", "-p", "no:cacheprovider")
    environment = clean_environment(TEST_LONG=long)
    result = shell(*collecting, "--collect-only", "-q", *arguments, environment=environment)
    assert result.returncode == 0, result.stdout
