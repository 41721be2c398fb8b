"""Extracts the text of one PDF, as a child process of `pdf_text`.

Standard input is the PDF as a regular file; the first argument is `{"cpu_seconds": …}`. The text of
each page is written as soon as it is extracted, so that it is not lost when a limit ends the
process. The exit code is 0, or PARTS_MISSING.
"""

from __future__ import annotations

import json
import sys

from common.bounded_process import limit_own_process

MEMORY = 512 << 20  # bytes
MOST_PAGES = 2000
MOST_BYTES = 8 << 20  # maximum size of the text
PARTS_MISSING = 71


def main() -> int:
    limit_own_process(json.loads(sys.argv[1])["cpu_seconds"], MEMORY)
    import pypdf

    left, code = MOST_BYTES, 0
    try:
        for place, page in enumerate(pypdf.PdfReader(sys.stdin.buffer).pages):
            if place == MOST_PAGES or left <= 0:
                return PARTS_MISSING
            text = page.extract_text().replace("\0", "").strip()
            written = text.encode("utf-8", "replace")[:left]
            if written:
                sys.stdout.buffer.write(written + b"\n\n")
                sys.stdout.buffer.flush()
            left -= len(written)
            code = PARTS_MISSING if left <= 0 else 0
    except Exception:  # pypdf raises many kinds for a broken file
        return PARTS_MISSING
    return code


if __name__ == "__main__":
    sys.exit(main())
