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

from bench import doctor, process
from bench.doctor import NEAR_TIE, Answer, difference, judged
from demo.chat import chosen_model
from tests.common.test_process_end import ADVICE

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
    monkeypatch.setenv("MODEL", str(TINY))
    report = tmp_path / "report.json"
    assert doctor.main([str(report)]) == 0
    findings = {finding["name"]: finding for finding in json.loads(report.read_text())}
    assert {finding["verdict"] for finding in findings.values()} <= {"ok", "note"}
    assert findings["alone and in a batch"]["detail"] == "4 of 4 answers are equal"
    speeds = findings["speed"]["figures"]
    assert speeds["backend"].keys() == speeds["mlx_lm"].keys()
    assert min(speeds["mlx_lm"].values()) > 0
    assert str(TINY.parent) not in report.read_text()
    assert len(capsys.readouterr().out.splitlines()) == len(findings) + 1


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["--json"], 2), (["report.json", "more"], 2)]
)
def test_help_and_unknown_arguments_check_nothing(
    arguments: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MODEL", str(tmp_path))  # without a model in it
    monkeypatch.chdir(tmp_path)
    assert doctor.main(arguments) == code
    shown = capsys.readouterr()
    assert "usage: mlx-backend doctor [MODEL] [REPORT]" in (shown.err if code else shown.out)
    assert code == 0 or f"unknown argument '{arguments[-1]}'" in shown.err
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_ends_the_checks_before_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", str(tmp_path))  # without a model in it
    (tmp_path / "file").touch()
    assert doctor.main([str(tmp_path / "file" / "report.json")]) == 1
    shown = capsys.readouterr()
    assert "the report cannot be written" in shown.err
    assert not shown.out


def test_a_machine_that_mlx_cannot_use_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nImportError: libcuda\n")

    monkeypatch.setattr(doctor, "_child", fail)
    monkeypatch.setenv("MODEL", str(TINY))
    assert doctor.main([str(tmp_path / "report.json")]) == 1
    assert re.search(r"FAILED +machine .* 1: ImportError: libcuda", capsys.readouterr().out)


def test_a_model_that_cannot_be_loaded_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    assert doctor.main([str(tmp_path / "report.json")]) == 1
    assert "FAILED  load" in capsys.readouterr().out


@pytest.mark.parametrize(("step", "number"), [("start", signal.SIGILL), ("load", signal.SIGSEGV)])
def test_a_signal_that_ends_the_backend_is_explained_and_ends_the_checks(
    step: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", str(TINY))
    before = psutil.Process().children()
    findings = []
    for finding in doctor.examine(chosen_model()):
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
    monkeypatch.setenv("MODEL", str(TINY))
    machine = next(doctor.examine(chosen_model()))
    assert machine.verdict == "FAILED"
    assert machine.detail.startswith("Python with MLX was ended by SIGILL: this CPU lacks")
    speed = doctor._compared({"decode": 1.0}, chosen_model())
    assert speed.verdict == "note"
    assert "mlx-lm was ended by SIGILL: this CPU lacks" in speed.detail


def test_a_backend_that_a_signal_ends_at_its_start_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MODEL", str(TINY))
    dying = ["sh", "-c", "kill -ILL $$"]
    monkeypatch.setattr(process, "command", lambda *_: dying)
    *_, start = doctor.examine(chosen_model())
    assert (start.name, start.verdict) == ("start", "FAILED")
    assert start.detail.startswith("the backend was ended by SIGILL: this CPU lacks")
