"""PaliGemma's prompts, whose tokens all attend to each other, and the requests refused for them.

The schedules are those of `tests/engine/test_parity`: rows join and leave, and are preempted, so
that a prompt is computed again together with a part of its answer. `test_families` compares the
same families with mlx-vlm's own generation.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from backend.engine.errors import InvalidRequest
from backend.engine.executing.score_plan import ScoreRequest
from backend.engine.request import ChatPrompt, RawPrompt
from backend.engine.vision.multimodal_model import MultimodalModel
from tests.engine.random_models import CONFIGS
from tests.engine.rounds import engine_model
from tests.engine.test_parity import check_schedule
from tests.engine.vision.checkpoint_files import begin_with
from tests.engine.vision.families import write_family
from tests.engine.vision.plain import AMONG_SIGNS, PlainPasses
from tests.engine.vision.seeing import answer_to, asking, picture, seeing, shown, turns
from tests.long import TEST_LONG

# Two in which tokens would change if a pass also had a part of an answer, or another prompt.
SCHEDULES = range(40) if TEST_LONG else (6, 13)
_TEXT = CONFIGS["full"] | {
    "model_type": "gemma2",
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 30.0,
}
_TOWER = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "image_size": 28}


def _network() -> MultimodalModel:
    from mlx_vlm.models import paligemma

    towers = {"text_config": _TEXT, "vision_config": {**_TOWER, "intermediate_size": 8}}
    whole = paligemma.Model(paligemma.ModelConfig.from_dict(towers))
    mx.random.seed(7)
    whole.update(tree_map(lambda value: mx.random.normal(value.shape) * 0.3, whole.parameters()))
    return MultimodalModel(whole)


def test_every_row_gets_the_same_tokens_as_alone() -> None:
    model = engine_model(_network(), reads_whole=True, prompt_cache_bytes=0)
    seen: Counter[str] = Counter()
    for seed in SCHEDULES:
        seen += check_schedule(model, seed)
    assert seen["rows preempted"] > len(SCHEDULES)
    assert not seen["passes shared"]
    assert not seen["rows served from the prefix cache"]


@pytest.mark.skipif(not TEST_LONG, reason="part of make test-long")
async def test_an_image_is_followed_by_one_begin_and_precedes_any_text(tmp_path: Path) -> None:
    """This holds although the tokenizer itself adds a begin token to other texts."""
    path = write_family(tmp_path / "paligemma", "paligemma")
    begin_with(path, "<bos>")
    messages, images = turns("What is it?"), [picture("red")]
    plain = PlainPasses(path)
    async with seeing(path) as engine:
        for prompt in (ChatPrompt(messages), RawPrompt("<__media__>What is it?")):
            answer = await answer_to(engine, asking(prompt, shown("red"), sampling=AMONG_SIGNS))
            assert answer.prompt_tokens == plain.prompt_tokens(messages, images)
            assert answer.tokens == plain.chooses(messages, images, answer.tokens)
        with pytest.raises(InvalidRequest, match="accepts only one item: send one"):
            await answer_to(engine, asking("Zyx?", shown("red", "blue")))
        with pytest.raises(InvalidRequest, match="attends to later tokens"):
            await answer_to(engine, asking(RawPrompt("Zyx?"), prompt_logprobs=1))
        with pytest.raises(InvalidRequest, match="attends to later tokens"):
            await engine.score(ScoreRequest("it", "The capital of France is", (" Paris.",)))
