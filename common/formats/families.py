"""The names that hosts and serving engines use for each family's parsers."""

from __future__ import annotations

from collections.abc import Mapping

from common.formats import (
    deepseek,
    gemma,
    glm,
    kimi,
    llama,
    minimax_m3,
    mistral,
    others,
    qwen,
    solar,
)
from common.formats.harmony import Harmony
from common.formats.reading import Tags
from common.formats.tagged_text import TaggedText

_HARMONY = Harmony()
_PLAIN = TaggedText()

_TOOL_NAMES: Mapping[TaggedText | Harmony, str] = {
    _PLAIN: "plain none",
    qwen.TEXT: "hermes qwen qwen2 qwen25 qwen3 qwen3_json json_tools granite4 qwen3_xml qwen3_coder"
    " nemotron_v3 step3p5",
    others.ERNIE_TEXT: "ernie45",
    deepseek.V3_TEXT: "deepseek_v3 deepseek_v31 deepseek_r1",
    deepseek.DSML_TEXT: "deepseek_v32 deepseek_v4 deepseek_v41",
    glm.GLM_TEXT: "glm45 glm47 glm5 laguna",
    glm.LONGCAT_TEXT: "longcat longcat_flash",
    gemma.GEMMA4_TEXT: "gemma4",
    gemma.FUNCTION_GEMMA_TEXT: "function_gemma functiongemma",
    kimi.K2_TEXT: "kimi_k2",
    kimi.K3_TEXT: "kimi_k3",
    llama.LLAMA_TEXT: "llama3_json llama4_json llama4_pythonic llama3 llama4 pythonic",
    llama.LFM2_TEXT: "lfm2 minicpm minicpm3 minicpm4",
    llama.OLMO3_TEXT: "olmo3",
    mistral.MISTRAL_TEXT: "mistral",
    others.MINIMAX_TEXT: "minimax_m2 minimax",
    minimax_m3.TEXT: "minimax_m3",
    others.MINICPM_TEXT: "minicpm5",
    others.SEED_TEXT: "seed_oss",
    others.MUSE_SPARK_TEXT: "muse_spark",
    others.MUSE_GLIMMER_TEXT: "muse_glimmer",
    others.GRANITE_TEXT: "granite granite3 granite_20b_fc",
    others.PHI4_TEXT: "phi4_mini_json phi4",
    others.JAMBA_TEXT: "jamba",
    others.HUNYUAN_TEXT: "hunyuan_a13b hunyuan",
    others.APRIEL_TEXT: "apriel",
    others.NEMOTRON_TEXT: "nemotron_json nemotron_nano_v2",
    others.COHERE_TEXT: "cohere_command3 cohere_command4 cohere",
    others.APERTUS_TEXT: "apertus",
    solar.TEXT: "solar_open",
    _HARMONY: "openai openai_gptoss gpt_oss gptoss harmony",
}
TOOLS: Mapping[str, TaggedText | Harmony] = {
    name: grammar for grammar, names in _TOOL_NAMES.items() for name in names.split()
}
"""The grammar for each value of `tool_parser:`."""

_THINK = (qwen.THINK,)
_THINKERS = """
    qwen3 deepseek_r1 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 glm45 glm47
    glm5 kimi_k2 minimax_m2 minimax_m2_append_think nemotron_v3 olmo3 ernie45 step3 step3p5
    hunyuan_a13b phi4 holo2 poolside_v1 minicpm5 laguna think
"""
HARMONY_REASONING = frozenset("openai_gptoss openai gpt_oss harmony".split())
REASONING: Mapping[str, tuple[Tags, ...]] = {
    **dict.fromkeys(_THINKERS.split(), _THINK),
    **dict.fromkeys(HARMONY_REASONING, ()),
    "gemma4": gemma.GEMMA4_TEXT.tags,
    "apertus": others.APERTUS_TEXT.tags,
    "apriel": others.APRIEL_TEXT.tags,
    **dict.fromkeys(("cohere_command3", "cohere_command4", "cohere"), others.COHERE_TEXT.tags),
    "granite": others.GRANITE_TAGS,
    "kimi_k3": kimi.K3_TEXT.tags,
    "longcat": glm.LONGCAT_TEXT.tags,
    "minimax_m3": minimax_m3.TEXT.tags,
    "mistral": mistral.MISTRAL_TEXT.tags,
    "muse_glimmer": others.MUSE_GLIMMER_TEXT.tags,
    "muse_spark": others.MUSE_SPARK_TEXT.tags,
    "seed_oss": others.SEED_TEXT.tags,
    "solar_open": solar.TEXT.tags,
    "none": (),
}
"""The tags for each value of `reasoning_parser:`."""
