"""Text and PDF files on the page: the text that is read from them and reaches the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.gateway.page.browser import Page

# Records the page's requests to the gateway.
LISTEN = """
window.asked = [];
const ask = window.fetch;
window.fetch = (path, options) => {
  if (path === 'v1/chat/completions') window.asked.push(JSON.parse(options.body));
  return ask(path, options);
};
"""
# Elements that are wider than their space.
WIDER = """
return ['html', 'body', '#scroller', '#composer', '#transcript', '.question'].filter((name) => {
  const it = document.querySelector(name);
  return it && it.scrollWidth > it.clientWidth;
});
"""


def pdf(*pages: str) -> bytes:
    """A PDF with one line of text on each page."""
    kids = " ".join(f"{3 + 2 * at} 0 R" for at in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
    ]
    for at, text in enumerate(pages):
        stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {4 + 2 * at} 0 R"
            " /Resources << /Font << /F1"
            " << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    written = b"%PDF-1.4\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        written
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\n"
            f"startxref\n{len(written)}\n%%EOF\n"
        ).encode()
    )


def attach(page: Page, file: Path, content: bytes) -> None:
    file.write_bytes(content)
    page.find("#files").send_keys(str(file))


def says(page: Page, sentence: str) -> bool:
    return sentence in page.text("#notice")


def test_text_and_pdf_files_reach_the_model_and_stay_in_the_conversation(
    page: Page, tmp_path: Path
) -> None:
    page.run(LISTEN)
    attach(page, tmp_path / "notes.py", b"x = '<b>\xc3\xa9</b>'\r\n")
    attach(page, tmp_path / "letter.pdf", pdf("Dear Ada,", "Yours, Bob"))
    attach(page, tmp_path / "wide.txt", "über".encode("utf-16"))
    page.until(lambda: len(page.all("#attached .chip")) == 3)
    page.ask("What is 2 + 2?")
    page.answered()
    expected = (
        "File “notes.py”:\n\nx = '<b>é</b>'\n\nEnd of file “notes.py”.\n\n"
        "File “letter.pdf”:\n\nDear Ada,\n\nYours, Bob\n\nEnd of file “letter.pdf”.\n\n"
        "File “wide.txt”:\n\nüber\n\nEnd of file “wide.txt”.\n\n"
        "What is 2 + 2?"
    )
    asked = page.run("return window.asked")
    assert [one["messages"] for one in asked] == [[{"role": "user", "content": expected}]]
    page.reload()
    page.find(".entry").click()
    page.all(".question .file summary")[1].click()
    page.until(lambda: "Yours, Bob" in page.all(".question .file pre")[1].text)
    assert page.text(".question .bubble") == "What is 2 + 2?"


def test_an_attached_file_can_be_removed(page: Page, tmp_path: Path) -> None:
    attach(page, tmp_path / "one.txt", b"one")
    attach(page, tmp_path / "two.txt", b"two")
    page.until(lambda: len(page.all("#attached .chip")) == 2)
    page.find("[aria-label='Remove one.txt']").click()
    assert page.find("#attached").text == "two.txt"
    assert page.focused() == "prompt"


def test_an_unreadable_file_is_refused_with_a_message(page: Page, tmp_path: Path) -> None:
    for name, content, sentence in [
        ("program.bin", b"\x7fELF\x00\x01\xff", "program.bin is not UTF-8 text, a PDF or"),
        ("nothing.txt", b" \n", "nothing.txt is empty."),
        ("broken.pdf", b"%PDF-1.4 and no more", "broken.pdf cannot be read as a PDF."),
        ("scan.pdf", pdf(""), "scan.pdf contains no text: attach its pages as images."),
        ("photo.heic", b"x", "photo.heic is image/heif: attach a PNG, JPEG, WebP or GIF."),
        ("image.png", b"x", "image.png cannot be read as an image."),
    ]:
        attach(page, tmp_path / name, content)
        page.until(partial(says, page, sentence))
    assert page.all("#attached > *") == []


@pytest.mark.parametrize("width", [360, 1200])
def test_a_long_name_makes_nothing_scroll_sideways(page: Page, tmp_path: Path, width: int) -> None:
    page.open(width, 740, model="tiny", temperature="0")
    attach(page, tmp_path / f"{'long' * 30}.txt", b"x" * 500)
    page.until(lambda: page.all("#attached .chip"))
    assert page.run(WIDER) == []
    page.ask("What is 2 + 2?")
    page.answered()
    page.find(".question .file summary").click()
    page.until(lambda: page.text(".question .file pre"))
    assert page.run(WIDER) == []
