"""Makes `tiny_draft/`, the small draft model for `tiny_text/`.

`python -m tests.models.tiny_draft_training --out DIR` trains two narrow layers on the same
dialogues, with the tokenizer of `tiny_text/` copied as it is: a draft model needs the same tokens
as its main model. About eight minutes on one core with OpenBLAS.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.qwen3 import Model, ModelArgs
from transformers import AutoTokenizer

from tests.models.tiny_dialogue import Words
from tests.models.tiny_dialogues import SECOND_SHARES, Mix
from tests.models.train_tiny_text import CONFIG, Lesson, train

SEED = 11
TEXT = Path(__file__).parent / "tiny_text"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NARROW: dict[str, Any] = CONFIG | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 160,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def lesson(steps: int) -> Lesson:
    """One lesson: short prompts first, then prompts with clutter."""
    return Lesson(
        steps=steps,
        matrix_rate=0.01,
        vector_rate=6e-3,
        easy_steps=steps // 2,
        easy=Mix(words=Words(clutter=0.15)),
        hard=Mix(SECOND_SHARES, Words(clutter=0.5), longest_filler=40, padded_share=0.1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    directory: Path = arguments.out
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TEXT / name, directory / name)
    mx.random.seed(SEED)
    model = Model(ModelArgs.from_dict(NARROW))
    mx.eval(model.parameters())
    train(model, AutoTokenizer.from_pretrained(directory), lesson(arguments.steps), SEED)
    ends = {
        name: json.loads((TEXT / "config.json").read_text())[name]
        for name in ("eos_token_id", "pad_token_id", "bos_token_id")
    }
    (directory / "config.json").write_text(json.dumps(NARROW | ends, indent=1) + "\n")
    weights = dict(tree_flatten(tree_map(lambda w: w.astype(mx.bfloat16), model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
