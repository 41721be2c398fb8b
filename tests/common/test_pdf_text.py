"""The text of PDFs: read by a child process, within limits."""

from __future__ import annotations

import asyncio
import queue
import signal
import subprocess
from collections.abc import Callable

import pytest

from common import pdf_text
from common.pdf_text import PdfText
from tests.common.pdf_files import (
    WITHOUT_TEXT,
    empty,
    in_base64,
    of_pages,
    slow,
    stream,
    with_streams,
)


def read(content: bytes, seconds: float = 30.0) -> PdfText:
    return asyncio.run(pdf_text.read(in_base64(content), seconds))


def test_pages_are_read_in_order_and_known_the_second_time() -> None:
    document = of_pages("First page.", "Second page.")
    first = read(document)
    assert first.text == "First page.\n\nSecond page."
    assert first.seconds > 0
    assert read(document) == PdfText(first.text, 0.0)


@pytest.mark.parametrize("written", [*WITHOUT_TEXT, empty, lambda: b"no PDF"])
def test_there_is_no_text_in_other_files(written: Callable[[], bytes]) -> None:
    """Among them a bomb, and pages that contain themselves."""
    assert read(written()).text == ""


def test_the_text_before_the_limit_is_kept() -> None:
    found = read(slow("The beginning."), 1.0)
    assert found.text.startswith("The beginning.")
    assert found.text.endswith("[The rest of this document could not be shown.]")


def test_a_cancelled_caller_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file would wait for a thread otherwise, and the exit of this process as well."""
    started: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
    begin = pdf_text._Reading.begin

    def watched(self: pdf_text._Reading, child: subprocess.Popen[bytes]) -> None:
        begin(self, child)
        started.put(child)

    monkeypatch.setattr(pdf_text._Reading, "begin", watched)

    async def leave() -> int:
        reading = asyncio.ensure_future(pdf_text.read(in_base64(slow("Left.")), 30.0))
        child = await asyncio.to_thread(started.get)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        return await asyncio.to_thread(child.wait)

    assert asyncio.run(leave()) == -signal.SIGKILL


def test_a_file_is_not_read_without_time() -> None:
    assert read(of_pages("Too late."), 0.0) == PdfText("", 0.0)
    assert asyncio.run(pdf_text.read("not base64!", 30.0)).text == ""


def test_a_broken_page_ends_the_text() -> None:
    broken = stream(b"BT (", b"/Filter /NoSuchFilter")
    found = read(with_streams(stream(b"BT /F 12 Tf (Whole.) Tj ET"), broken))
    assert found.text == "Whole.\n\n[The rest of this document could not be shown.]"


def test_a_failure_of_the_program_is_logged_and_the_file_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    document = of_pages("Read later.")
    with monkeypatch.context() as patched:
        patched.setattr(pdf_text, "_PROGRAM", "common.no_such_program")
        assert read(document).text == ""
    assert "the process for reading PDFs failed" in caplog.text
    assert read(document).text == "Read later."


def test_texts_are_read_again_if_they_are_too_long_to_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pdf_text, "_MOST_KEPT", 0)
    document = of_pages("Not kept.")
    assert read(document).text == "Not kept."
    assert read(document).seconds > 0
