"""`make chat` as a person has it: in a terminal of its own, and in a pipe."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terminal.commands import COMMANDS, BadCommand, Session, carry_out, help_text
from terminal.conversation import Answer, Conversation
from terminal.screen import harmless
from tests.gateway.gateway_process import ROOT, TINY_TEXT, GatewayProcess, roomy, tiny

WAIT = 90.0
MARK = "MLX_TERMINAL_TEST_RUN"
COMMAND = [str(ROOT / "scripts" / "python"), "-m", "terminal"]
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cf"
    "c0000003010100c9fe92ef0000000049454e44ae426082"
)


def piped(
    *lines: str, arguments: tuple[str, ...], mark: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        env=os.environ | {MARK: mark},
        timeout=WAIT,
        check=False,
    )


class Terminal:
    """A pseudo-terminal with the program in it, and all that it has shown."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        self._end = ours
        self.shown = ""
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, process_group=0
        )
        os.close(theirs)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._end, 4096)
            except OSError:  # the other end is closed
                return
            with self._news:
                self.shown += data.decode(errors="replace")
                self._news.notify_all()

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: text in self.shown, WAIT), self.shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)
        os.close(self._end)


@contextmanager
def in_terminal(gateway: GatewayProcess) -> Iterator[Terminal]:
    shown = Terminal("--url", gateway.url, "--model", "tiny")
    try:
        shown.until("/help lists the commands")
        yield shown
    finally:
        shown.close()


@pytest.fixture
def terminal(gateway: GatewayProcess) -> Iterator[Terminal]:
    with in_terminal(gateway) as shown:
        yield shown


@pytest.fixture
def endless_terminal() -> Iterator[Terminal]:
    """At a gateway whose model writes on until it is stopped."""
    gateway = GatewayProcess({"tiny": roomy()})
    try:
        with in_terminal(gateway) as shown:
            yield shown
    finally:
        gateway.close()


def test_a_pipe_gets_the_answers_and_nothing_else(gateway: GatewayProcess) -> None:
    done = piped(
        "/set temperature 0",
        "My name is Ada.",
        "What is my \\",
        "name?",
        "/quit",
        "never asked",
        arguments=("--url", gateway.url, "--model", "tiny"),
    )
    assert done.returncode == 0
    assert done.stdout == "Nice to meet you, Ada.\nYour name is Ada.\n"
    assert "temperature is 0" in done.stderr


def test_reasoning_stays_out_of_a_pipe(gateway: GatewayProcess) -> None:
    arguments = ("--url", gateway.url, "--model", "tiny")
    done = piped("/set temperature 0", "What is 3 + 4?", "/retry", arguments=arguments)
    assert done.stdout == "3 + 4 = 7\n3 + 4 = 7\n"
    assert "I have to find 3 plus 4." in done.stderr


def test_an_image_is_refused_in_a_sentence_and_forgotten(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    image = tmp_path / "pixel.png"
    image.write_bytes(PIXEL)
    done = piped(
        "/set temperature 0",
        f"/image {image}",
        "What is this?",
        "What is 3 + 4?",
        arguments=("--url", gateway.url, "--model", "tiny"),
    )
    assert "image" in done.stderr.lower().replace(str(image).lower(), "")
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith("3 + 4 = 7\n")
    assert done.returncode == 0


def test_what_fails_is_the_exit_code_of_a_pipe(gateway: GatewayProcess) -> None:
    long = "word " * 5000
    done = piped(long, arguments=("--url", gateway.url, "--model", "tiny"))
    assert done.returncode == 1
    assert "context" in done.stderr
    nobody = piped("x", arguments=("--url", "http://127.0.0.1:9"))
    assert nobody.returncode == 1
    assert nobody.stderr == "error: the gateway cannot be reached: is it still running?\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(endless_terminal: Terminal) -> None:
    terminal = endless_terminal
    terminal.type("Say la forever.\n")
    terminal.until("la la la")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("[stopped")
    terminal.type("/set temperature 0\n")
    terminal.type("What is 3 + 4?\n")
    terminal.until("3 + 4 = 7")
    terminal.type("/quit\n")
    assert terminal.process.wait(WAIT) == 0


def test_reasoning_is_dimmed_in_a_terminal(terminal: Terminal) -> None:
    terminal.type("/set temperature 0\n")
    terminal.type("What is 3 + 4?\n")
    terminal.until("tokens in")
    thought, _, answer = terminal.shown.partition("I have to find")
    assert thought.endswith("\x1b[2m")
    assert "\x1b[0m" in answer
    assert answer.rpartition("\x1b[0m\r\n\r\n")[2].startswith("3 + 4 = 7")


def test_a_tool_call_asks_for_the_answer_of_the_tool(terminal: Terminal, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    described = {"name": "get_weather", "description": "Get the weather.", "parameters": parameters}
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": described}]))
    terminal.type("/set temperature 0\n")
    terminal.type(f"/tools {tools}\n")
    terminal.until("may call get_weather")
    terminal.type("What is the weather in Paris?\n")
    terminal.until('calls get_weather({"city": "Paris"})')
    terminal.until("what get_weather answers> ")
    terminal.type('{"temperature": 21, "condition": "sunny"}\n')
    terminal.until("21 ")


def test_it_starts_a_gateway_and_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps({"name": "tiny", **tiny()}))
    mark = uuid.uuid4().hex  # what every process below inherits
    arguments = ("--models-dir", str(tmp_path))
    done = piped("/set temperature 0", "What is 3 + 4?", arguments=arguments, mark=mark)
    assert done.stdout == "3 + 4 = 7\n", done.stderr
    assert [process for process in psutil.process_iter() if _has(process, mark)] == []


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def session() -> Session:
    return Session(Conversation("tiny"), lambda: ["tiny", "other"])


def test_commands_change_the_request() -> None:
    talk = session()
    for line in ("/model other", "/system Be brief.", "/set top_k 5", "/set thinking off"):
        carry_out(talk, line)
    talk.conversation.ask("Hello")
    assert talk.conversation.request() == {
        "model": "other",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "top_k": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    carry_out(talk, "/set top_k")
    carry_out(talk, "/set thinking")
    assert set(talk.conversation.request()) == {"model", "messages"}


@pytest.mark.parametrize(
    "line",
    [
        "/model nobody",
        "/set heat 3",
        "/set top_k much",
        "/set thinking maybe",
        "/image x.txt",
        "/image /nowhere.png",
        "/tools /nowhere.json",
        f"/tools {TINY_TEXT}/config.json",
        "/dance",
    ],
)
def test_bad_commands_say_why(line: str) -> None:
    with pytest.raises(BadCommand) as refused:
        carry_out(session(), line)
    assert str(refused.value)[0].isalnum() or str(refused.value)[0] in "/'"


def test_help_tells_of_every_command() -> None:
    for name in (*COMMANDS, "retry", "help", "quit"):
        assert f"/{name}" in help_text()


def test_an_unanswered_question_is_not_sent_again() -> None:
    talk = Conversation("tiny")
    talk.ask("refused")
    talk.take(Answer())
    talk.ask("next")
    assert [message["content"] for message in talk.messages] == ["next"]


@given(st.text())
def test_a_model_cannot_drive_the_terminal(text: str) -> None:
    shown = harmless(text)
    assert not any(ord(letter) < 32 and letter not in "\t\n" for letter in shown)
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert shown == harmless(shown)
    assert [letter for letter in text if letter.isalnum()] == [
        letter for letter in shown if letter.isalnum()
    ]
