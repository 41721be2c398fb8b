"""The `openai` SDK: transcriptions in each form, as a stream, translations, and errors."""

import json
import sys
from pathlib import Path

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
RECORDING = Path(sys.argv[2])


def ask(**fields):
    with RECORDING.open("rb") as file:
        return client.audio.transcriptions.create(model="whisper", file=file, **fields)


def refusal(**fields):
    try:
        ask(**fields)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.param]
    return []


plain = ask(language="en")
results = {"json": plain.text}
verbose = ask(
    language="en",
    response_format="verbose_json",
    timestamp_granularities=["word", "segment"],
)
results["verbose"] = [verbose.text, verbose.language, verbose.duration]
results["segments"] = [[each.start, each.end, each.text] for each in verbose.segments]
results["words"] = [[each.start, each.end, each.word] for each in verbose.words]
for form in ("text", "srt", "vtt"):
    results[form] = ask(language="en", response_format=form)
events = list(ask(language="en", stream=True))
results["types"] = [event.type for event in events]
results["streamed"] = "".join(getattr(event, "delta", "") for event in events)
results["done"] = events[-1].text
with RECORDING.open("rb") as file:
    translated = client.audio.translations.create(model="whisper", file=file)
results["translated"] = translated.text
results["bad_language"] = refusal(language="xx")
results["bad_form"] = refusal(response_format="doc")
results["speakers"] = refusal(extra_body={"known_speaker_names": ["Ada"]})

print(json.dumps(results))
