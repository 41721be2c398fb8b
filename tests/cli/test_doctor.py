"""`make doctor` on a small model, and its verdict on answers that differ."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import backend_process, doctor
from cli.backend_process import options_for
from cli.doctor import NEAR_TIE, Answer, difference, judged
from tests.common.test_process_end import ADVICE
from tests.engine.speech.tiny_speech import write_whisper

TINY = Path(__file__).parents[1] / "models" / "tiny_text"


def answer(tokens: list[str], best: dict[str, float]) -> Answer:
    return Answer(tokens, [best] * len(tokens), "".join(tokens), len(tokens), 1, 0, 1.0, 1.0)


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_equal_answers_do_not_differ(one: list[str], other: list[str]) -> None:
    best = {"a": -0.5, "b": -0.75, "c": -4.0}
    found = difference(answer(one, best), answer(other, best))
    assert (found is None) == (one == other)


def test_the_first_difference_counts() -> None:
    best = {"a": -0.5, "b": -0.75}
    assert difference(answer(["a", "a"], best), answer(["a", "b"], best)) == 0.25
    assert difference(answer(["a"], best), answer(["z"], best)) == float("inf")


def test_a_near_tie_is_a_note_and_anything_else_a_failure() -> None:
    assert judged([], 4)[0] == "ok"
    assert judged([NEAR_TIE / 2], 4)[0] == "note"
    assert judged([NEAR_TIE / 2, 1.0], 4)[0] == "FAILED"


def test_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert doctor.run(str(TINY), report) == 0
    findings = {finding["name"]: finding for finding in json.loads(report.read_text())}
    assert {finding["verdict"] for finding in findings.values()} <= {"ok", "note"}
    assert findings["alone and in a batch"]["detail"] == "4 of 4 answers are equal"
    speeds = findings["speed"]["figures"]
    assert speeds["backend"].keys() == speeds["mlx_lm"].keys()
    assert min(speeds["mlx_lm"].values()) > 0
    assert str(TINY.parent) not in report.read_text()
    assert len(capsys.readouterr().out.splitlines()) == len(findings) + 1


def test_checks_that_a_kind_of_model_does_not_answer_are_no_failures(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert doctor.run(str(write_whisper(tmp_path / "whisper")), report) == 0
    findings = {finding["name"]: finding for finding in json.loads(report.read_text())}
    assert findings["load"]["verdict"] == "ok"
    assert {finding["verdict"] for finding in findings.values()} == {"ok", "note"}
    assert "not checked: " in findings["answer"]["detail"]


def test_a_report_that_cannot_be_written_ends_the_checks_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert doctor.run(str(tmp_path), tmp_path / "file" / "report.json") == 1
    shown = capsys.readouterr()
    assert "the report cannot be written" in shown.err
    assert not shown.out


def test_a_machine_that_mlx_cannot_use_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nImportError: libcuda\n")

    monkeypatch.setattr(doctor, "_child", fail)
    assert doctor.run(str(TINY), tmp_path / "report.json") == 1
    assert re.search(r"FAILED +machine .* 1: ImportError: libcuda", capsys.readouterr().out)


def test_a_model_that_cannot_be_loaded_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    assert doctor.run(str(tmp_path / "model"), tmp_path / "report.json") == 1
    assert "FAILED  load" in capsys.readouterr().out


@pytest.mark.parametrize(("step", "number"), [("start", signal.SIGILL), ("load", signal.SIGSEGV)])
def test_a_signal_that_ends_the_backend_is_explained_and_ends_the_checks(
    step: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    findings = []
    for finding in doctor.examine(options_for(str(TINY))):
        findings.append(finding)
        if finding.name == step:
            (backend,) = set(psutil.Process().children()) - set(before)
            backend.send_signal(number)
    last = findings[-1]
    assert (findings[-2].name, last.verdict) == (step, "FAILED")
    assert last.detail.startswith(f"the backend was ended by {number.name}: ")
    assert all(words in last.detail for words in ADVICE[number])


def test_a_signal_that_ends_another_process_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    run = doctor._child
    monkeypatch.setattr(
        doctor, "_child", lambda _: run(["-c", "import os; os.kill(os.getpid(), 4)"])
    )
    machine = next(doctor.examine(options_for(str(TINY))))
    assert machine.verdict == "FAILED"
    assert machine.detail.startswith("Python with MLX was ended by SIGILL: this CPU lacks")
    speed = doctor._compared({"decode": 1.0}, options_for(str(TINY)))
    assert speed.verdict == "note"
    assert "mlx-lm was ended by SIGILL: this CPU lacks" in speed.detail


def test_a_backend_that_a_signal_ends_at_its_start_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dying = ["sh", "-c", "kill -ILL $$"]
    monkeypatch.setattr(backend_process, "command", lambda *_: dying)
    *_, start = doctor.examine(options_for(str(TINY)))
    assert (start.name, start.verdict) == ("start", "FAILED")
    assert start.detail.startswith("the backend was ended by SIGILL: this CPU lacks")
