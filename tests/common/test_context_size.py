"""The context of a model, by every name that families have for it."""

from typing import Any

import pytest

from common.context_size import UNBOUNDED, context_of, served_context


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"n_ctx": 512}, 512),
        ({"max_seq_len": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"llm_config": {"seq_length": 8192}}, 8192),
        ({"language_config": {"max_position_embeddings": 8192}}, 8192),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 8192}}}, 8192),
        ({"thinker_config": 3, "n_ctx": 512}, 512),
        ({"max_position_embeddings": None, "n_ctx": 512}, 512),
        ({"max_position_embeddings": True, "max_seq_len": 0}, UNBOUNDED),
        ({"model_type": "mamba"}, UNBOUNDED),
    ],
)
def test_own_context(config: dict[str, Any], expected: int) -> None:
    assert context_of(config) == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 4096}, 32768),
        ({"rope_type": "yarn", "factor": 4.0}, 32768),
        ({"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 1}, 32768),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 8.0}, 32768),
        ("linear", 32768),
    ],
)
def test_scaled_context(scaling: object, expected: int) -> None:
    assert context_of({"max_position_embeddings": 32768, "rope_scaling": scaling}) == expected
    if isinstance(scaling, dict):
        own = {"max_position_embeddings": 32768, "rope_parameters": scaling}
        assert context_of(own) == expected


def test_a_requested_context_can_only_shorten_it() -> None:
    assert served_context(4096, 0) == 4096
    assert served_context(4096, 1024) == 1024
    assert served_context(4096, 8192) == 4096
