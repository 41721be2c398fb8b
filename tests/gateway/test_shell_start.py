"""The gateway as a program: its start, its first lines, and the end of its last process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.gateway.gateway_process import ROOT, WAIT, GatewayProcess, tiny


def test_it_lists_its_models_and_ends_with_its_backends(gateway: GatewayProcess) -> None:
    response = gateway.client.get("/v1/models").json()
    assert "tiny" in {model["id"] for model in response["data"]}
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "2+2"}],
        "stream": True,
        "max_tokens": 4,
    }
    with gateway.client.stream("POST", "/v1/chat/completions", json=question) as answer:
        assert list(answer.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert len(gateway.backends()) == 1


def test_the_command_to_try_is_for_a_model_that_answers() -> None:
    embedder = {"parameters": {"model": "owner/name"}, "embeddings": True}
    for models, tried in (({"a": embedder, "b": tiny()}, ['"model": "b"']), ({"a": embedder}, [])):
        gateway = GatewayProcess(models)
        gateway.close()
        commands = [line for line in gateway.log if "try: curl" in line]
        assert len(commands) == len(tried)
        assert all(part in line for part, line in zip(tried, commands, strict=True))


def test_a_garbage_collection_does_not_search_what_stays(tmp_path: Path) -> None:
    # A search of all that the imports create takes a tenth of a second, and stops every stream.
    program = (
        "import gc; from gateway import __main__ as shell;"
        " shell.Server.run = lambda *_, **__: print(len(gc.get_objects())); shell.main()"
    )
    arguments = ("--models-dir", str(tmp_path), "--port", "0")
    child = subprocess.run(
        [str(ROOT / "scripts" / "python"), "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
    )
    assert int(child.stdout) < 1_000, "objects that a collection would search"


def test_backends_have_process_groups_but_no_sessions(gateway: GatewayProcess) -> None:
    # A session would be a scheduling group of its own on Linux, and its streams would stutter.
    question = {"model": "tiny", "prompt": "2+2", "max_tokens": 1}
    gateway.client.post("/v1/completions", json=question).raise_for_status()
    (backend,) = gateway.backends()
    assert os.getpgid(backend.pid) == backend.pid
    assert os.getsid(backend.pid) == os.getsid(gateway.child.pid)
