"""`make bench BENCH=gpu` on a CPU, with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from backend import __main__ as entry
from backend.engine import device
from bench import gpu, measured_backend, process
from bench.__main__ import main
from cli import backend_process

SIZES = gpu.Sizes((16, 40, 96), (1, 2), 8)


@pytest.mark.parametrize(("order", "model"), [*zip(["", "gpu"], gpu.TINY_MODELS, strict=True)])
def test_both_programs_are_measured(
    order: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ORDER", order)
    waits = device.may_wait_within_a_step
    monkeypatch.setattr(device, "may_wait_within_a_step", waits)  # restored after the test
    monkeypatch.setattr(gpu, "REPORT", tmp_path / "build" / "gpu.json")
    monkeypatch.setattr(gpu, "TINY_SIZES", SIZES)
    monkeypatch.setattr(gpu, "TINY_MODELS", {model: gpu.TINY_MODELS[model]})
    assert main(["gpu"]) == 0
    report = json.loads(gpu.REPORT.read_text())
    assert report["order"] == order
    results = report["results"]
    assert {one["model"] for one in results} == {model}
    bare = [one for one in results if "without a scheduler" in one["figure"]]
    assert len(bare) == 4
    assert all("mlx-backend" not in one for one in bare)
    assert all(one["mlx-backend"] > 0 for one in results if one not in bare)
    assert all(one["mlx-lm"] > 0 for one in results)
    assert len(results) == 17
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == len(results) + 2


def test_every_backend_works_in_the_order_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDER", "gpu")
    monkeypatch.setattr(entry, "main", lambda *_: device.may_wait_within_a_step())
    monkeypatch.setattr(device, "may_wait_within_a_step", lambda: True)
    monkeypatch.setattr(measured_backend, "Worker", SimpleNamespace(_memory=None))
    assert measured_backend.main() is False
    started: list[tuple[str, ...]] = []

    def command(*words: str) -> list[str]:
        started.append(words)
        return ["false"]

    monkeypatch.setattr(backend_process, "command", command)
    with pytest.raises(RuntimeError), process.process():
        pass
    assert "bench.measured_backend" in started[0]


def test_without_time_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_SECONDS", "0")
    monkeypatch.setattr(gpu, "REPORT", tmp_path / "gpu.json")
    assert main(["gpu"]) == 0
    assert json.loads(gpu.REPORT.read_text())["results"] == []


def test_an_unknown_order_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORDER", "cuda")
    assert main(["gpu"]) == 2
    assert "ORDER is 'cuda'" in capsys.readouterr().out
