"""`make demo` as a new user runs it, and its messages when something is wrong."""

import os
import subprocess
from pathlib import Path

from demo import default_model

ROOT = Path(__file__).resolve().parents[2]
TINY_TEXT = ROOT / "tests" / "models" / "tiny_text"


def demo(**changes: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PROMPT", "MODEL")}
    return subprocess.run(
        [str(ROOT / "scripts/python"), "-m", "demo.chat"],
        env=environment | changes,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_it_answers_with_a_sensible_sentence_and_figures() -> None:
    default_model.ensure()
    result = demo()
    assert result.returncode == 0, result.stderr
    question, answer, figures = result.stdout.splitlines()
    assert question == "> What is the capital of France?"
    assert answer == "The capital of France is Paris."
    assert "37 prompt tokens, " in figures
    assert "tokens/s" in figures


def test_the_prompt_and_the_model_can_be_given() -> None:
    result = demo(PROMPT="My name is Ida. What is my name?", MODEL=str(TINY_TEXT))
    assert result.returncode == 0, result.stderr
    question, answer, _ = result.stdout.splitlines()
    assert question == "> My name is Ida. What is my name?"
    assert answer


def test_a_missing_model_is_one_readable_line() -> None:
    result = demo(MODEL="/no/such/model")
    assert result.returncode == 1
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert "/no/such/model" in line
    assert "Traceback" not in result.stderr
