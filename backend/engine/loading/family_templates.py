"""Chat templates for families whose checkpoints have none.

Their processors write the prompt around one question instead.
"""

from __future__ import annotations

from typing import Any

# PaliGemma has no roles. The image comes first, because mlx-vlm counts positions from there.
_PALIGEMMA = r"""
{%- set all = namespace(image="", texts=[]) %}
{%- for message in messages %}
  {%- if message.content is string %}
    {%- set all.texts = all.texts + [message.content] %}
  {%- else %}
    {%- for part in message.content or [] %}
      {%- if part.type == "image" %}
        {%- set all.image = "<image>" %}
      {%- elif part.type == "text" %}
        {%- set all.texts = all.texts + [part.text] %}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{{- all.image + all.texts | join("\n") }}
"""
# GOT-OCR was trained with one question after this system message, and no line breaks between turns.
_GOT = r"""
{%- if messages[0].role != "system" %}
  {{- "<|im_start|>system\n        You should follow the instructions carefully and explain" }}
  {{- " your answers in detail.<|im_end|>" }}
{%- endif %}
{%- for message in messages %}
  {{- "<|im_start|>" + message.role + "\n" }}
  {%- if message.content is string %}
    {{- message.content }}
  {%- else %}
    {%- for part in message.content or [] %}
      {%- if part.type == "image" %}
        {{- "<img><imgpad></img>\n" }}
      {%- elif part.type == "text" %}
        {{- part.text }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
_TEMPLATES = {"got": _GOT.strip(), "paligemma": _PALIGEMMA.strip()}


def of_family(model_type: str) -> dict[str, Any]:
    """The arguments that give a tokenizer its family's template; none if there is none here."""
    template = _TEMPLATES.get(model_type.lower())
    return {"chat_template": template} if template else {}
