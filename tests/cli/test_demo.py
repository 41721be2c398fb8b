"""`make demo` as a new user runs it, and its messages when something is wrong."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cli import default_model
from tests.common.test_process_end import ADVICE
from tests.polling import until

ROOT = Path(__file__).resolve().parents[2]
TINY_TEXT = ROOT / "tests" / "models" / "tiny_text"


PYTHON = str(ROOT / "scripts/python")
COMMAND = [PYTHON, "-m", "cli.demo"]
# An answer that ends at the context, seconds later.
ENDLESS = [PYTHON, "-c", "from cli import demo; demo.MOST_TOKENS = 1 << 20; exit(demo.main())"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PROMPT", "MODEL")}


def demo(**changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        COMMAND,
        env=ENVIRONMENT | changes,
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
    changes = {"PROMPT": "My name is Ida. What is my name?", "LOCALAI_GRPC_AUTH_TOKEN": "hosts"}
    result = demo(MODEL=str(TINY_TEXT), **changes)
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


@pytest.mark.parametrize(
    ("step", "number"),
    [("starting the backend", signal.SIGILL), ("loading", signal.SIGKILL), ("> ", signal.SIGSEGV)],
)
def test_a_signal_that_ends_the_backend_is_explained(step: str, number: signal.Signals) -> None:
    environment = ENVIRONMENT | {"MODEL": str(TINY_TEXT), "PROMPT": "Say tick forever."}
    with subprocess.Popen(
        ENDLESS, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as running:
        assert running.stdout is not None
        while step.encode() not in running.stdout.readline():
            assert running.poll() is None
        backends = psutil.Process(running.pid).children
        until(backends)
        backends()[0].send_signal(number)
        *_, last = running.stdout.read().decode().splitlines()
    assert running.returncode == 1
    assert last.startswith(f"error: the backend was ended by {number.name}: ")
    assert all(words in last for words in ADVICE[number])


def test_the_lines_that_explain_a_failed_start_are_shown() -> None:
    result = demo(MODEL=str(TINY_TEXT), RANKS="many")
    assert result.returncode == 1
    *_, line, error = result.stderr.splitlines()
    assert "--ranks must be a number" in line, result.stderr
    assert error.startswith("error: the backend ended with exit code 2")
