"""Writes the results of reference implementations for the same checkpoints: tiny ones, and MiniLM.

Run where sentence-transformers (with torch) is installed; the project itself does not need it:

    python -m tests.engine.embedding.make_references FOLDER_OF_ALL_MINILM_L6_V2
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.embedding.texts import TEXTS as REAL_TEXTS
from tests.engine.embedding.tiny_checkpoints import (
    EMBEDDERS,
    LABELLERS,
    QUERY,
    RERANKERS,
    TEXTS,
    write,
)

HERE = Path(__file__).parent
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer"
    " the query\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>"
    "\n\n"
)


def embedded(folder: Path, texts: list[str], batch: int) -> np.ndarray:
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    model = SentenceTransformer(str(folder), device="cpu")
    vectors: np.ndarray = model.encode(texts, batch_size=batch, convert_to_numpy=True)
    return vectors


def reranked(family: str, folder: Path) -> list[float]:
    import torch  # type: ignore[import-not-found]
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for text in TEXTS:
        with torch.no_grad():
            if family == "qwen3_rerank":
                model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
                row = tokenizer(PROMPT.format(QUERY, text), return_tensors="pt")
                logits = model(**row).logits[0, -1]
                yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
                score = torch.softmax(logits[[yes, no]], 0)[0]
            else:
                model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
                row = tokenizer(QUERY, text, return_tensors="pt")
                score = torch.sigmoid(model(**row).logits[0, 0])
        scores.append(float(score))
    return scores


def labelled(folder: Path) -> list[list[list[float]]]:
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForTokenClassification.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    return [torch.softmax(row, -1).tolist() for row in rows]


def main() -> None:
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for family in EMBEDDERS:
            folder = write(family, Path(scratch) / family)
            recorded[family] = embedded(folder, list(TEXTS), 1).tolist()
        for family in RERANKERS:
            recorded[family] = reranked(family, write(family, Path(scratch) / family))
        for family in LABELLERS:
            recorded[family] = labelled(write(family, Path(scratch) / family))
    (HERE / "tiny_references.json").write_text(json.dumps(recorded))
    vectors = embedded(Path(sys.argv[1]), list(REAL_TEXTS), 32).astype("<f2")
    (HERE / "minilm_vectors.txt").write_text(base64.b64encode(vectors.tobytes()).decode() + "\n")


if __name__ == "__main__":
    main()
