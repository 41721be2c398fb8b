"""The call grammar for each chat format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from common.call_grammar import bare_families as bare
from common.call_grammar import json_families as as_json
from common.call_grammar import tagged_families as tagged
from common.call_grammar.rules import Markers, RuleBook
from common.call_grammar.tools import CallableTool


class _Family(Protocol):
    def grammar(self, book: RuleBook, tools: Sequence[CallableTool], *, parallel: bool) -> str: ...


_NAMES: tuple[tuple[_Family, str], ...] = (
    (
        as_json.HERMES,
        "hermes qwen qwen2 qwen25 qwen3 qwen3_json json_tools granite4 trinity ernie45",
    ),
    (tagged.QWEN_XML, "qwen3_xml qwen3_coder qwen3_5 nemotron_v3 step3p5 step5 mimo iquest_coder"),
    (as_json.DEEPSEEK_V3, "deepseek_v3 deepseek_r1 deepseekv3"),
    (as_json.DEEPSEEK_V31, "deepseek_v31 deepseekv31"),
    (tagged.DSML_V32, "deepseek_v32 deepseekv32"),
    (tagged.DSML_V4, "deepseek_v4 deepseekv4"),
    (tagged.DSML_V41, "deepseek_v41 deepseekv41"),
    (tagged.GIGACHAT35, "gigachat35"),
    (tagged.STEP3, "step3"),
    (tagged.DOTS, "dots"),
    (tagged.GLM, "glm45 glm47 glm5 glm laguna poolside_v1 ling3 spark25 spark3"),
    (tagged.HY_V3, "hy_v3 hy3"),
    (tagged.HY_V4, "hy_v4"),
    (tagged.IQUEST, "iquest_coder_v2"),
    (tagged.K2_HORIZON, "k2_horizon k2_v3"),
    (tagged.SOLAR2, "solar_open2"),
    (tagged.LONGCAT, "longcat longcat_flash"),
    (bare.GEMMA4, "gemma4"),
    (bare.FUNCTION_GEMMA, "function_gemma functiongemma"),
    (as_json.KIMI_K2, "kimi_k2 kimi"),
    (tagged.KIMI_K3, "kimi_k3"),
    (as_json.LLAMA, "llama3_json llama4_json llama3"),
    (bare.LLAMA4, "llama4_pythonic llama4 pythonic"),
    (bare.LFM2, "lfm2 minicpm minicpm3 minicpm4"),
    (bare.OLMO3, "olmo3"),
    (as_json.MISTRAL_LIST, "mistral"),
    (tagged.MINIMAX, "minimax_m2 minimax"),
    (tagged.MINIMAX_M3, "minimax_m3"),
    (tagged.MINICPM, "minicpm5 minicpm4_xml"),
    (tagged.SEED, "seed_oss"),
    (tagged.MUSE_SPARK, "muse_spark"),
    (tagged.MUSE_GLIMMER, "muse_glimmer muse musespark1x"),
    (as_json.GRANITE, "granite granite3"),
    (as_json.GRANITE_20B, "granite_20b_fc"),
    (as_json.PHI4, "phi4_mini_json phi4"),
    (as_json.JAMBA, "jamba hunyuan_a13b hunyuan apriel"),
    (as_json.NEMOTRON, "nemotron_json nemotron_nano_v2"),
    (as_json.COHERE, "cohere_command3 cohere_command4 cohere"),
    (as_json.APERTUS, "apertus apertus2509"),
    (as_json.SOLAR, "solar_open"),
    (as_json.PLAMO, "plamo3"),
    (as_json.FUNCTIONARY_31, "functionary_v3_1"),
    (as_json.FUNCTIONARY, "functionary functionary_v3 functionary_v3_2"),
    (as_json.FIREFUNCTION, "firefunction firefunction_v2"),
    (as_json.XLAM, "xlam"),
    (as_json.INTERNLM, "internlm internlm2 internlm3 interns1 intern_s1"),
    (as_json.GIGACHAT3, "gigachat3"),
    (as_json.HYPERCLOVA, "hyperclovax hyperclovax_seed_think_14b"),
    (as_json.SARASHINA, "sarashina"),
    (as_json.PANGU, "pangu openpangu openpangu_v2"),
    (as_json.INKLING, "inkling"),
    (as_json.COMMAND_R, "command_r command_r_plus"),
    (as_json.HARMONY, "openai openai_gptoss gpt_oss gptoss harmony beam"),
)
FAMILIES: Mapping[str, _Family] = {
    name: family for family, names in _NAMES for name in names.split()
}
"""Keys are the names in `common.formats.families`."""


def writes_hermes_calls(format_name: str) -> bool:
    """Whether the format's calls are JSON between <tool_call> and </tool_call>."""
    return FAMILIES.get(format_name) is as_json.HERMES


def call_grammar(
    format_name: str,
    tools: Sequence[CallableTool],
    markers: Markers,
    json_options: Mapping[str, Any],
    *,
    parallel: bool,
) -> str:
    """A Lark grammar with the rule `start` for one call, or with `parallel` for one or more.

    json_options: llguidance's options for the JSON in it. Raises ValueError, with an explanation,
    for a format or a tool that cannot be enforced.
    """
    if not tools:
        raise ValueError("there is no tool to call")
    family = FAMILIES.get(format_name)
    if family is as_json.MISTRAL_LIST and markers.has("[ARGS]"):
        family = as_json.MISTRAL_ARGS
    if family is None:
        raise ValueError(
            "tool calls cannot be enforced with this model: its answers have the format"
            f" {format_name}, which has no grammar for calls; require no call and mark no tool as"
            " strict, or load the model with another tool_parser"
        )
    return family.grammar(RuleBook(markers, json_options), tools, parallel=parallel)
