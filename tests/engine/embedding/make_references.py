"""Writes the results of reference implementations for the same checkpoints: tiny ones, and MiniLM.

Run where sentence-transformers (with torch) is installed; the project itself does not need it:

    python -m tests.engine.embedding.make_references FOLDER_OF_ALL_MINILM_L6_V2
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.embedding import jina_v4_checkpoint
from tests.engine.embedding import logit_rerankers as logits
from tests.engine.embedding import rotary_checkpoints as rotary
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


GEMMA_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query"
    " by providing a prediction of either 'Yes' or 'No'."
)


def gemma_row(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a pair as the model card of bge-reranker-v2-gemma makes them."""

    def tokens(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    start = tokenizer.convert_tokens_to_ids("<bos>")
    pair = [start, *tokens(f"A: {QUERY}"), *tokens("\n"), *tokens(f"B: {text}")]
    return [*pair, *tokens("\n"), *tokens(GEMMA_PROMPT)]


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
            elif family == "gemma_rerank":
                model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
                ids = gemma_row(tokenizer, text)
                (yes,) = tokenizer("Yes", add_special_tokens=False)["input_ids"]
                score = torch.sigmoid(model(torch.tensor([ids])).logits[0, -1, yes])
            else:
                model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
                row = tokenizer(QUERY, text, return_tensors="pt")
                score = torch.sigmoid(model(**row).logits[0, 0])
        scores.append(float(score))
    return scores


def answered(folder: Path, documents: list[str]) -> list[float]:
    """Scores of a reranker with steps of sentence-transformers."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu")
    return [float(model.predict([(QUERY, document)])[0]) for document in documents]


def labelled(folder: Path) -> list[list[list[float]]]:
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForTokenClassification.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    return [torch.softmax(row, -1).tolist() for row in rows]


def embedded_for_task(folder: Path, task: str) -> list[list[float]]:
    """Vectors with a task's adapter, pooled and scaled as jina-embeddings-v3's. Needs peft."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype="float32")
    subfolder = task.replace(".", "_").replace("-", "_")
    model.load_adapter(str(folder), adapter_name="own", adapter_kwargs={"subfolder": subfolder})
    model.set_adapter("own")
    model.eval()
    with torch.no_grad():
        pooled = [model(**tokenizer(text, return_tensors="pt"))[0][0].mean(0) for text in TEXTS]
    return [torch.nn.functional.normalize(one, dim=0).tolist() for one in pooled]


def embedded_by_qwen(folder: Path) -> list[list[float]]:
    """Vectors of Qwen2.5-VL's language model, pooled and scaled as jina-embeddings-v4's."""
    import torch
    from transformers import AutoTokenizer
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = Qwen2_5_VLTextModel.from_pretrained(folder, dtype="float32").eval()
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    with torch.no_grad():
        pooled = [model(input_ids=row).last_hidden_state[0].mean(0) for row in rows]
    return [torch.nn.functional.normalize(one, dim=0).tolist() for one in pooled]


def in_form_of_xlm_roberta(published: Path, folder: Path) -> Path:
    """A jina-reranker-v2 for transformers' own XLM-RoBERTa, which computes the same."""
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map")
    (folder / "config.json").write_text(json.dumps(config))
    found = {}
    for full, value in load_file(folder / "model.safetensors").items():
        name = full
        for before, after in _XLM_ROBERTA:
            name = name.replace(before, after)
        if "Wqkv" not in name:
            found[name] = value
            continue
        for part, piece in zip(("query", "key", "value"), np.split(value, 3), strict=True):
            found[name.replace("mixer.Wqkv", f"attention.self.{part}")] = piece.copy()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


_XLM_ROBERTA = (
    ("emb_ln", "embeddings.LayerNorm"),
    ("encoder.layers.", "encoder.layer."),
    ("mixer.out_proj", "attention.output.dense"),
    ("norm1", "attention.output.LayerNorm"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
    ("norm2", "output.LayerNorm"),
)


def of_rotary_checkpoints(scratch: Path) -> dict[str, Any]:
    """References of models with rotary positions, and Jina's, read in transformers 5's form."""
    recorded: dict[str, Any] = {}
    for family in rotary.OF_TRANSFORMERS:
        published = rotary.write(family, scratch / f"{family}_published")
        folder = rotary.in_form_of_transformers(published, scratch / family)
        if family in rotary.RERANKERS:
            recorded[family] = reranked(family, folder)
        else:
            recorded[family] = embedded(folder, list(TEXTS), 1).tolist()
    for task in rotary.TASKS[:2]:
        recorded[f"jina_v3 {task}"] = embedded_for_task(scratch / "jina_v3", task)
    published = jina_v4_checkpoint.write(scratch / "jina_v4")
    for task in jina_v4_checkpoint.TASKS[:2]:
        folder = jina_v4_checkpoint.merged_text_model(published, task, scratch / f"jina_v4 {task}")
        recorded[f"jina_v4 {task}"] = embedded_by_qwen(folder)
    published = rotary.write("jina_reranker", scratch / "jina_reranker_published")
    folder = in_form_of_xlm_roberta(published, scratch / "jina_reranker")
    recorded["jina_reranker"] = reranked("jina_reranker", folder)
    return recorded


def main() -> None:
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        recorded |= of_rotary_checkpoints(Path(scratch))
        for family in EMBEDDERS:
            folder = write(family, Path(scratch) / family)
            recorded[family] = embedded(folder, list(TEXTS), 1).tolist()
        for family in RERANKERS:
            recorded[family] = reranked(family, write(family, Path(scratch) / family))
        for name in logits.RERANKERS:
            folder = logits.write_reranker(name, Path(scratch) / name)
            recorded[name] = answered(folder, list(TEXTS))
            recorded[f"{name} long"] = answered(folder, [logits.LONG])
        folder = logits.write_pooled_reranker(Path(scratch) / "pooled reranker")
        recorded["pooled reranker"] = answered(folder, list(TEXTS))
        for family in LABELLERS:
            recorded[family] = labelled(write(family, Path(scratch) / family))
    (HERE / "tiny_references.json").write_text(json.dumps(recorded))
    vectors = embedded(Path(sys.argv[1]), list(REAL_TEXTS), 32).astype("<f2")
    (HERE / "minilm_vectors.txt").write_text(base64.b64encode(vectors.tobytes()).decode() + "\n")


if __name__ == "__main__":
    main()
