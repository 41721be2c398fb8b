"""Every case of the corpus gives the expected message, in every split."""

from __future__ import annotations

import pytest

from common.chat_format import ChatFormat
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import TOOLS, Case, elements, json_blocks, qwen, sections, tagged, unquoted
from tests.common.corpus.agents import AGENTS
from tests.common.corpus.drift import DRIFT
from tests.common.corpus.field import REPORTED
from tests.common.corpus.mistakes import MISTAKES
from tests.common.corpus.variants import VARIANTS

FAMILIES: dict[tuple[str, str | None, str], list[Case]] = {
    ("hermes", "qwen3", qwen.HEADER): qwen.JSON_CASES,
    ("granite4", None, qwen.HEADER): qwen.JSON_CASES,
    ("qwen3_coder", "qwen3", qwen.HEADER): qwen.XML_CASES,
    ("deepseek_v3", "deepseek_r1", sections.DEEPSEEK_HEADER): sections.DEEPSEEK_CASES,
    ("deepseek_v32", "deepseek_v3", sections.DEEPSEEK_HEADER): tagged.DSML_V32,
    ("deepseek_v4", "deepseek_v3", sections.DEEPSEEK_HEADER): tagged.DSML_V4,
    ("deepseek_v41", None, sections.DEEPSEEK_HEADER): tagged.DSML_V41,
    ("glm45", "glm45", tagged.GLM_HEADER): tagged.GLM_LINES,
    ("glm47", "glm45", tagged.GLM_HEADER): tagged.GLM_INLINE,
    ("longcat", None, ""): tagged.LONGCAT,
    ("minimax_m2", "minimax_m2", ""): tagged.MINIMAX,
    ("minimax_m3", None, ""): elements.M3,
    ("minicpm5", None, ""): tagged.MINICPM,
    ("muse_glimmer", None, tagged.GLIMMER_HEADER): tagged.GLIMMER,
    ("kimi_k2", "kimi_k2", sections.KIMI_HEADER): sections.KIMI_CASES,
    ("kimi_k3", "kimi_k3", tagged.K3_HEADER): tagged.KIMI_K3,
    ("gemma4", "gemma4", unquoted.GEMMA4_HEADER): unquoted.GEMMA4,
    ("function_gemma", None, ""): unquoted.FUNCTION_GEMMA,
    ("llama3_json", None, unquoted.LLAMA_HEADER): unquoted.LLAMA3,
    ("llama4_pythonic", None, unquoted.LLAMA_HEADER): unquoted.LLAMA4,
    ("lfm2", None, qwen.HEADER): unquoted.LFM2,
    ("mistral", "mistral", unquoted.MISTRAL_HEADER): unquoted.MISTRAL,
    ("openai", "openai_gptoss", unquoted.HARMONY_HEADER): unquoted.HARMONY,
    ("phi4_mini_json", None, ""): unquoted.PHI4,
    ("granite", "granite", ""): unquoted.GRANITE,
    ("cohere", "cohere", json_blocks.COHERE_HEADER): json_blocks.COHERE,
    ("apertus", None, ""): json_blocks.APERTUS,
    ("hunyuan_a13b", "hunyuan_a13b", ""): json_blocks.HUNYUAN,
    ("solar_open", None, sections.SOLAR_HEADER): sections.SOLAR,
    ("apriel", None, json_blocks.APRIEL_HEADER): json_blocks.APRIEL,
    ("nemotron_json", None, json_blocks.NEMOTRON_HEADER): json_blocks.NEMOTRON,
    **VARIANTS,
}
CASES = [
    pytest.param(names, case, id=f"{names[0]}: {case.why}")
    for names, cases in (
        *FAMILIES.items(),
        *REPORTED.items(),
        *MISTAKES.items(),
        *DRIFT.items(),
        *AGENTS.items(),
    )
    for case in cases
]


@pytest.mark.parametrize(("names", "case"), CASES)
def test_case(names: tuple[str, str | None, str], case: Case) -> None:
    message = parse_every_split(
        ChatFormat.named(names[0], names[1]),
        case.text,
        tools=TOOLS if case.tools is None else case.tools,
        tail=names[2] if case.tail is None else case.tail,
        reason="length" if case.cut else "stop",
        count=25,
    )
    assert plain(message) == (case.content, case.reasoning, case.calls)
