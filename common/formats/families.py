"""The names that hosts and serving engines use for each family's parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.formats import (
    deepseek,
    functionary,
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
    qwen.TEXT: "hermes qwen qwen2 qwen25 qwen3 qwen3_json json_tools granite4 trinity qwen3_xml"
    " qwen3_coder qwen3_5 nemotron_v3 step3p5 step5 mimo iquest_coder functionary_v3_1",
    others.ERNIE_TEXT: "ernie45",
    deepseek.V3_TEXT: "deepseek_v3 deepseek_v31 deepseek_r1 deepseekv3 deepseekv31",
    deepseek.DSML_TEXT: "deepseek_v32 deepseek_v4 deepseek_v41 deepseekv32 deepseekv4 deepseekv41",
    deepseek.GIGACHAT35_TEXT: "gigachat35",
    deepseek.STEP3_TEXT: "step3",
    glm.GLM_TEXT: "glm45 glm47 glm5 glm laguna poolside_v1 ling3 spark25 spark3",
    glm.HY_TEXT: "hy_v3 hy_v4 hy3",
    glm.IQUEST_TEXT: "iquest_coder_v2",
    glm.K2_HORIZON_TEXT: "k2_horizon k2_v3",
    glm.SOLAR2_TEXT: "solar_open2",
    glm.LONGCAT_TEXT: "longcat longcat_flash",
    gemma.GEMMA4_TEXT: "gemma4",
    gemma.FUNCTION_GEMMA_TEXT: "function_gemma functiongemma",
    kimi.K2_TEXT: "kimi_k2 kimi",
    kimi.K3_TEXT: "kimi_k3",
    llama.LLAMA_TEXT: "llama3_json llama4_json llama4_pythonic llama3 llama4 pythonic",
    llama.LFM2_TEXT: "lfm2 minicpm minicpm3 minicpm4",
    llama.OLMO3_TEXT: "olmo3",
    mistral.MISTRAL_TEXT: "mistral",
    others.MINIMAX_TEXT: "minimax_m2 minimax",
    minimax_m3.TEXT: "minimax_m3",
    others.MINICPM_TEXT: "minicpm5 minicpm4_xml",
    others.SEED_TEXT: "seed_oss",
    others.MUSE_SPARK_TEXT: "muse_spark",
    others.MUSE_GLIMMER_TEXT: "muse_glimmer muse musespark1x",
    others.GRANITE_TEXT: "granite granite3 granite_20b_fc",
    others.PHI4_TEXT: "phi4_mini_json phi4 firefunction firefunction_v2",
    others.JAMBA_TEXT: "jamba",
    others.HUNYUAN_TEXT: "hunyuan_a13b hunyuan",
    others.APRIEL_TEXT: "apriel",
    others.NEMOTRON_TEXT: "nemotron_json nemotron_nano_v2",
    others.COHERE_TEXT: "cohere_command3 cohere_command4 cohere",
    others.APERTUS_TEXT: "apertus apertus2509",
    others.COMMAND_R_TEXT: "command_r command_r_plus",
    others.DOTS_TEXT: "dots",
    others.GIGACHAT3_TEXT: "gigachat3",
    others.HYPERCLOVA_TEXT: "hyperclovax hyperclovax_seed_think_14b",
    others.INKLING_TEXT: "inkling",
    others.INTERNLM_TEXT: "internlm internlm2 internlm3 interns1 intern_s1",
    others.PANGU_TEXT: "pangu openpangu openpangu_v2",
    others.SARASHINA_TEXT: "sarashina",
    functionary.FUNCTIONARY_TEXT: "functionary functionary_v3 functionary_v3_2",
    functionary.XLAM_TEXT: "xlam",
    solar.TEXT: "solar_open",
    solar.PLAMO_TEXT: "plamo3",
    _HARMONY: "openai openai_gptoss gpt_oss gptoss harmony beam",
}
TOOLS: Mapping[str, TaggedText | Harmony] = {
    name: grammar for grammar, names in _TOOL_NAMES.items() for name in names.split()
}
"""The grammar for each value of `tool_parser:`."""

_THINK = (qwen.THINK,)
_THINKERS = """
    qwen3 deepseek_r1 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 glm45 glm47
    glm5 kimi_k2 minimax_m2_append_think nemotron_v3 olmo3 ernie45 step3
    hunyuan_a13b phi4 holo2 poolside_v1 minicpm5 laguna think gigachat35 interns1 ling3 mimo
    iquest_coder iquest_coder_v2 step5 granite_thinking_parser minicpmv qwen3_thinking
    nemotron_3
"""
HARMONY_REASONING = frozenset("openai_gptoss openai gpt_oss harmony beam".split())
REASONING: Mapping[str, tuple[Tags, ...]] = {
    **dict.fromkeys(_THINKERS.split(), _THINK),
    **dict.fromkeys(HARMONY_REASONING, ()),
    "gemma4": gemma.GEMMA4_TEXT.tags,
    "apertus": others.APERTUS_TEXT.tags,
    "apriel": others.APRIEL_TEXT.tags,
    **dict.fromkeys(("cohere_command3", "cohere_command4", "cohere"), others.COHERE_TEXT.tags),
    "granite": others.GRANITE_TAGS,
    "hy_v3": glm.HY_TEXT.tags,
    "hy_v4": glm.HY_TEXT.tags,
    **dict.fromkeys(("hyperclovax", "hyperclovax_seed_think_14b"), others.HYPERCLOVA_TEXT.tags),
    "inkling": others.INKLING_TEXT.tags,
    "k2_horizon": glm.K2_HORIZON_TEXT.tags,
    "kimi": (Tags("◁think▷", "◁/think▷"),),
    "kimi_k3": kimi.K3_TEXT.tags,
    "longcat": glm.LONGCAT_TEXT.tags,
    **dict.fromkeys(("minimax_m2", "minimax"), others.MINIMAX_TEXT.tags),
    "minimax_m3": minimax_m3.TEXT.tags,
    "mistral": mistral.MISTRAL_TEXT.tags,
    **dict.fromkeys(("muse_glimmer", "muse", "musespark1x"), others.MUSE_GLIMMER_TEXT.tags),
    "muse_spark": others.MUSE_SPARK_TEXT.tags,
    "seed_oss": others.SEED_TEXT.tags,
    "pangu": others.PANGU_TEXT.tags,
    "plamo3": solar.PLAMO_TEXT.tags,
    "solar_open": solar.TEXT.tags,
    "step3p5": (replace(qwen.THINK, anywhere=True),),
    "solar_open2": glm.SOLAR2_TEXT.tags,
    "none": (),
}
"""The tags for each value of `reasoning_parser:`."""
