"""How much memory models may take if nothing limits it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.device_memory import device_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
GIB = 1 << 30


def test_it_is_the_control_groups_limit_minus_a_reserve(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("0")
    most = device_memory(tmp_path)
    for limit, left in ((2 * GIB, GIB), (3 * GIB, 3 * GIB // 2)):
        (group / "memory.max").write_text(str(limit))
        assert device_memory(tmp_path) == left < most


def test_it_is_the_memory_of_the_graphics_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '81559\\n81559\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    without = device_memory(tmp_path)
    package = tmp_path / "mlx_cuda_13-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.1\n")
    assert device_memory(tmp_path) == without
    monkeypatch.syspath_prepend(str(tmp_path))
    assert device_memory(tmp_path) == (81559 << 20) - GIB
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert device_memory(tmp_path) == without
