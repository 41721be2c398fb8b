"""Unusual tokenizers and templates: Mistral's, named templates, code, overlapping tokens.

All are read from files, by the loader that reads a model's.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import json
import platform
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from backend.engine.constraints import compiler
from backend.engine.constraints.matching import TokenizerSource
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.table import source_of
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.tokenizer import end_tokens, load_tokenizer
from backend.engine.loading.weights import _template_of
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import ChatPrompt, RawPrompt
from backend.engine.settings import Settings
from backend.engine.token_text import TokenTexts
from common.chat_format import ChatFormat

CORPUS = ["the quick brown fox", "a lazy dog jumps, twice!", "naïve café 好的 😀 élan"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return tokenizer


def _sentencepiece(strips: bool) -> Tokenizer:
    """Llama's form, or Gemma's, which drops no first space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strips else []), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])]
    )
    octets = [f"<0x{value:02X}>" for value in range(256)]
    _train(tokenizer, trainers.BpeTrainer(vocab_size=340, special_tokens=[*SPECIAL, *octets]))
    # The octets are pieces of the model, not added tokens.
    whole = json.loads(tokenizer.to_str())
    whole["added_tokens"] = [one for one in whole["added_tokens"] if one["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(whole))


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _train(tokenizer, trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>"))
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFD()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=80))
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    if not trainer.special_tokens:
        trainer.special_tokens = [AddedToken(text, special=True) for text in SPECIAL]
    tokenizer.train_from_iterator([*CORPUS, "line one\nline two\n three"], trainer)
    # As in real models: one begins with another, and one is not a control token.
    tokenizer.add_special_tokens([AddedToken("<|im_end|>x", normalized=False)])
    tokenizer.add_tokens([AddedToken("word", normalized=False)])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "sentencepiece": lambda: _sentencepiece(strips=True),
    "sentencepiece as it is": lambda: _sentencepiece(strips=False),
    "unigram": _unigram,
    "word piece": _word_piece,
}


def _folder(path: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        config |= {"bos_token": "<s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}
        (path / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return path


def _loaded(path: Path, **settings: Any) -> Any:
    config = json.loads((path / "config.json").read_text())
    return load_tokenizer(Checkpoint(path, "it", config, 0), Settings.from_values(settings))


def _prompts(tokenizer: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer, 4096, 1 << 20)


@pytest.fixture(scope="module", params=list(KINDS))
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _loaded(_folder(tmp_path_factory.mktemp("kinds") / "it", KINDS[request.param]()))


@given(st.data())
def test_a_stream_gives_the_text_that_decoding_at_once_gives(
    any_tokenizer: Any, data: st.DataObject
) -> None:
    count = max(any_tokenizer.get_vocab().values()) + 1
    tokens = data.draw(st.lists(st.integers(0, count - 1), max_size=24))
    whole = any_tokenizer.decode(tokens)
    stream = TokenTexts(any_tokenizer).stream(False)
    decoded = "".join([*(stream.add(token) for token in tokens), stream.finish()])
    # octets that are not a character; each kind of tokenizer drops them in its own way
    if "\ufffd" in whole:
        assert "\ufffd" not in decoded
    else:
        assert decoded == whole


@given(text=st.text(st.sampled_from("the quick, brown\nfox <|im_end|>xwordé好😀"), max_size=40))
def test_a_stream_restores_a_text_as_its_tokenizer_does(any_tokenizer: Any, text: str) -> None:
    tokens = any_tokenizer.encode(text, add_special_tokens=False)
    stream = TokenTexts(any_tokenizer).stream(False)
    decoded = "".join([*(stream.add(token) for token in tokens), stream.finish()])
    assert decoded == any_tokenizer.decode(tokens)


def test_a_continuation_keeps_the_space_of_its_first_word(any_tokenizer: Any) -> None:
    before = any_tokenizer.encode("the", add_special_tokens=False)
    after = any_tokenizer.encode("the dog", add_special_tokens=False)[len(before) :]
    stream = TokenTexts(any_tokenizer).stream(True)
    decoded = "".join([*(stream.add(token) for token in after), stream.finish()])
    assert decoded == any_tokenizer.decode([*before, *after])[len(any_tokenizer.decode(before)) :]
    assert "dog" in decoded


def test_runs_of_spaces_that_are_added_tokens_are_spaces(tmp_path: Path) -> None:
    """Gemma's vocabulary has such tokens."""
    made = _sentencepiece(strips=False)
    made.add_tokens([AddedToken("▁▁▁▁", normalized=False)])
    tokenizer = _loaded(_folder(tmp_path / "it", made))
    tokens = [tokenizer.convert_tokens_to_ids("▁▁▁▁"), *tokenizer.encode("fox")]
    assert _streamed(tokenizer, tokens) == "    fox" == tokenizer.decode(tokens)


_AS_USUAL = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_UNUSUAL: dict[str, Callable[[], Tokenizer]] = {
    "two spaces": lambda: _decoded_by(_sentencepiece(True), *_AS_USUAL, decoders.Strip(" ", 2, 0)),
    "another letter": lambda: _decoded_by(
        _sentencepiece(True), decoders.Replace("q", "Q"), *_AS_USUAL
    ),
    "a letter of bytes": lambda: _decoded_by(
        _byte_level(), decoders.Replace("q", "Q"), decoders.ByteLevel()
    ),
}


def _decoded_by(tokenizer: Tokenizer, *parts: Any) -> Tokenizer:
    tokenizer.decoder = decoders.Sequence([*parts])
    return tokenizer


def _streamed(tokenizer: Any, tokens: list[int]) -> str:
    stream = TokenTexts(tokenizer).stream(False)
    return "".join([*(stream.add(token) for token in tokens), stream.finish()])


@pytest.mark.parametrize("unusual", list(_UNUSUAL))
def test_an_unusual_decoder_is_followed(tmp_path: Path, unusual: str) -> None:
    tokenizer = _loaded(_folder(tmp_path / "it", _UNUSUAL[unusual]()))
    tokens = tokenizer.encode("  the quick fox", add_special_tokens=False)
    assert _streamed(tokenizer, tokens) == tokenizer.decode(tokens)


def test_a_stream_gives_spaces_before_punctuation_that_cleaning_up_would_take_back(
    tmp_path: Path,
) -> None:
    tokenizer = _loaded(_folder(tmp_path / "it", _unigram(), clean_up_tokenization_spaces=True))
    tokens = tokenizer.encode("the quick !", add_special_tokens=False)
    kept = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert _streamed(tokenizer, tokens) == kept != tokenizer.decode(tokens)


def test_a_decoder_that_panics_fails_its_row_alone(tmp_path: Path) -> None:
    """A panic is not an Exception: it would end the engine thread."""
    made = _decoded_by(_sentencepiece(True), *_AS_USUAL, decoders.Strip(" ", 1, 1))
    tokenizer = _loaded(_folder(tmp_path / "it", made))
    with pytest.raises(RuntimeError, match="the tokenizer cannot decode"):
        TokenTexts(tokenizer).stream(False).add(tokenizer.convert_tokens_to_ids("▁"))


TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


@given(
    texts=st.lists(
        st.sampled_from(["<|im_end|>x", "<|im_end|>", "<|im_", "end|>", "x", "word", " a ", "é"]),
        max_size=8,
    )
)
def test_overlapping_tokens_in_a_message_stay_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "overlapping"
    if not path.exists():
        _folder(path, _byte_level(), chat_template=TEMPLATE)
    tokenizer = _loaded(path)
    content = "".join(texts)
    built = _prompts(tokenizer).build(ChatPrompt(({"role": "user", "content": content},)))
    control = {tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|im_end|>x")}
    assert not control & set(built.tokens)
    shown = tokenizer.decode(built.tokens)
    assert shown == f"<s>{unicodedata.normalize('NFC', content)}</s>"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_composed_and_decomposed_texts_are_tokenised_as_usual(
    tmp_path: Path, kind: str, form: Any
) -> None:
    tokenizer = _loaded(_folder(tmp_path / "it", KINDS[kind](), chat_template=TEMPLATE))
    text = unicodedata.normalize(form, "élan naïve <|im_end|> café")
    built = _prompts(tokenizer).build(ChatPrompt(({"role": "user", "content": text},)))
    shown = tokenizer.decode(built.tokens)
    wanted = unicodedata.normalize("NFC", text) if kind == "byte-level" else text
    assert wanted in shown
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in built.tokens


NAMED = [
    {"name": "default", "template": "plain {{ messages[0].content }}"},
    {"name": "tool_use", "template": "tools {{ tools[0].function.name }} <tool_call>"},
    {"name": "rag", "template": "documents"},
]


def _named_in_json(path: Path) -> None:
    _folder(path, _byte_level(), chat_template=NAMED)


def _named_in_files(path: Path) -> None:
    _folder(path, _byte_level(), chat_template="old")
    (path / "chat_template.jinja").write_text(NAMED[0]["template"])
    (path / "additional_chat_templates").mkdir()
    for one in NAMED[1:]:
        (path / "additional_chat_templates" / f"{one['name']}.jinja").write_text(one["template"])


@pytest.mark.parametrize("write", [_named_in_json, _named_in_files])
def test_named_templates(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "it")
    tokenizer = _loaded(tmp_path / "it")
    prompts = _prompts(tokenizer)
    message = {"role": "user", "content": "Hello"}
    assert prompts.render(ChatPrompt((message,))) == "plain Hello"
    assert prompts.render(ChatPrompt((message,), TOOLS)) == "tools look <tool_call>"
    found = _template_of(tokenizer)
    assert found is not None
    assert "<tool_call>" in found
    assert "plain" in found


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    path = _folder(tmp_path / "it", _byte_level(), chat_template=NAMED[1:])
    prompts = _prompts(_loaded(path))
    message = {"role": "user", "content": "Hello"}
    assert prompts.render(ChatPrompt((message,), TOOLS)) == "tools look <tool_call>"
    with pytest.raises(InvalidRequest, match="its chat templates are named rag, tool_use"):
        prompts.render(ChatPrompt((message,)))


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    path = _folder(tmp_path / "it", _byte_level(), chat_template="old")
    (path / "chat_template.jinja").write_text("new")
    assert _template_of(_loaded(path)) == "new"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
        {"model_type": "llama4_text", "attn_temperature_tuning": 4},
    ],
    ids=["wrong arithmetic", "wrong type"],
)
def test_a_configuration_that_transformers_refuses_has_a_tokenizer(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    path = _folder(tmp_path / "it", _byte_level(), chat_template=TEMPLATE)
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = _loaded(path)
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert _template_of(tokenizer) == TEMPLATE
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a valid tokenizer"):
        _loaded(path)


def test_a_tokenizer_with_its_own_code_is_not_run_without_trust(tmp_path: Path) -> None:
    path = _folder(tmp_path / "it", _byte_level())
    (path / "tokenizer.json").unlink()
    (path / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import PreTrainedTokenizer\n"
        "class Own(PreTrainedTokenizer):\n"
        "    vocab_size = 1\n"
        "    def get_vocab(self): return {'a': 0}\n"
        "    def _tokenize(self, text): return list(text)\n"
        "    def _convert_token_to_id(self, token): return 0\n"
        "    def _convert_id_to_token(self, index): return 'a'\n"
        "    def save_vocabulary(self, *a, **k): return ()\n"
    )
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelRejected, match="is not run unless the host sets trust_remote_code"):
        _loaded(path)
    assert not (tmp_path / "ran").exists()
    assert _loaded(path, trust_remote_code=True).decode([0]) == "a"
    assert (tmp_path / "ran").exists()


MISTRAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
MISTRAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>"]
MISTRAL += ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"]


def _tekken(path: Path, version: str) -> Path:
    _folder(path)
    pieces = [bytes([value]) for value in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(MISTRAL)
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + 20,
        "default_num_special_tokens": 20,
        "version": version,
    }
    whole = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (path / "tekken.json").write_text(json.dumps(whole))
    (path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return path


_CALL: dict[str, Any] = {"id": "abc123def", "type": "function"}
_CALL |= {"function": {"name": "look", "arguments": {"at": "it"}}}
DIALOGUE = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abc123def", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": [{"type": "text", "text": "And?"}]},
)
_SHOWN = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "look", "description": "",'
_SHOWN += ' "parameters": {}}}]'
_SHOWN += "[/AVAILABLE_TOOLS]"
_LISTED = '[TOOL_CALLS][{"name": "look", "arguments": {"at": "it"}, "id": "abc123def"}]</s>'
WRITTEN = {
    "v3": "<s>[INST]hello[/INST]"
    + _LISTED
    + '[TOOL_RESULTS]{"content": 42, "call_id": "abc123def"}[/TOOL_RESULTS]It is 42.</s>'
    + _SHOWN
    + "[INST]Be kind.\n\nAnd?[/INST]",
    "v7": "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]hello[/INST]"
    + _LISTED
    + "[TOOL_RESULTS]abc123def[TOOL_CONTENT]42[/TOOL_RESULTS]It is 42.</s>"
    + _SHOWN
    + "[INST]And?[/INST]",
    "v11": "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]hello[/INST]"
    '[TOOL_CALLS]look[CALL_ID]abc123def[ARGS]{"at": "it"}</s>'
    "[TOOL_RESULTS]abc123def[TOOL_CONTENT]42[/TOOL_RESULTS]It is 42.</s>"
    + _SHOWN
    + "[INST]And?[/INST]",
    "v13": "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT]"
    + _SHOWN
    + '[INST]hello[/INST][TOOL_CALLS]look[ARGS]{"at": "it"}</s>'
    "[TOOL_RESULTS]42[/TOOL_RESULTS]It is 42.</s>[INST]And?[/INST]",
}


@pytest.mark.parametrize("version", list(WRITTEN))
def test_mistrals_own_tokenizer_without_a_template(tmp_path: Path, version: str) -> None:
    tokenizer = _loaded(_tekken(tmp_path / "it", version))
    prompts = _prompts(tokenizer)
    assert prompts.render(ChatPrompt(DIALOGUE, TOOLS)) == WRITTEN[version]
    built = prompts.build(ChatPrompt(({"role": "user", "content": "hello</s>"},)))
    assert built.tokens[:3] == [1, 3, 20 + 259]
    assert built.tokens[-1] == 4
    assert 2 not in built.tokens
    assert end_tokens(tokenizer) == {2}
    stream = TokenTexts(tokenizer).stream(False)
    tokens = tokenizer.encode("hello 好 😀", add_special_tokens=False)
    assert "".join(stream.add(token) for token in tokens) == "hello 好 😀"


def test_a_template_beside_mistrals_tokenizer_is_used(tmp_path: Path) -> None:
    path = _tekken(tmp_path / "it", "v13")
    (path / "chat_template.jinja").write_text("own")
    assert _template_of(_loaded(path)) == "own"


@pytest.mark.parametrize(
    "grows",
    [
        [normalizers.Replace("a", "a" * 10)] * 4,
        [normalizers.Replace(Regex("b*"), "a" * 5000)],
        [normalizers.Prepend("a" * 5000)],
        [normalizers.Sequence([normalizers.Replace("a", "a" * 99)] * 2), normalizers.Prepend("é")],
    ],
)
def test_a_normalizer_that_exhausts_memory_is_refused(
    grows: list[normalizers.Normalizer], tmp_path: Path
) -> None:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.Sequence(grows)
    with pytest.raises(ModelRejected, match=r"its tokenizer\.json can make"):
        _loaded(_folder(tmp_path / "it", tokenizer))


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("tokenizer.json", "", "tokenizer.json is not valid JSON: it is empty"),
        ("tokenizer.json", '{"model"', "tokenizer.json is not valid JSON: Expecting ':'"),
        ("tokenizer.json", "[]", "tokenizer.json is not a JSON object"),
        ("tokenizer.json", "{}", "tokenizer.json is not a valid tokenizer: Model missing"),
        ("tokenizer_config.json", '{"eos_token": []}', "a value in tokenizer_config.json is"),
    ],
)
def test_the_broken_file_of_a_tokenizer_is_named(
    tmp_path: Path, file: str, content: str, why: str
) -> None:
    path = _folder(tmp_path, _byte_level())
    (path / file).write_text(content)
    with pytest.raises(ValueError, match=re.escape(why)):
        _loaded(path)


def test_a_text_for_which_a_tokenizer_panics_is_refused(tmp_path: Path) -> None:
    """A panic of Rust is not an Exception."""
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    prompts = _prompts(_loaded(_folder(tmp_path / "it", tokenizer)))
    text = "a" * 28 + "b"
    for read in (prompts.tokenize, lambda text: prompts.build(RawPrompt(text))):
        with pytest.raises(InvalidRequest, match="the model's tokenizer fails for this text: Onig"):
            read(text)


def test_a_tokenizer_without_grammars_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=a|bc)b"), "isolated")
    tokenizer = _loaded(_folder(tmp_path / "it", tokenizer))
    tried: list[object] = []

    def source(*given: Any) -> TokenizerSource:
        tried.append(given)
        return source_of(*given)

    monkeypatch.setattr(compiler, "source_of", source)
    plain = compiler.ConstraintCompiler(tokenizer, 320, [], ChatFormat.named("plain"))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"its tokenizer is not supported \("):
            plain.compile(ConstraintSpec("regex", "a"))
    assert len(tried) == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc for the bytes in use")
def test_a_tokenizer_that_has_encoded_text_leaves_nothing_behind(tmp_path: Path) -> None:
    path = _folder(tmp_path, _byte_level())
    text = " ".join(map(str, range(100_000, 100_300)))

    def load() -> None:
        _loaded(path).encode(text)

    load()
    before = _heap_bytes()
    for _ in range(5):
        load()
    assert _heap_bytes() - before < 100_000  # with a cache of its words, each would leave 147,000


class _HeapInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())
    uordblks: int


def _heap_bytes() -> int:
    """Bytes that malloc has handed out."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _HeapInfo
    found: _HeapInfo = ask()
    return found.uordblks


@pytest.mark.parametrize("prefix", ["<s>", "<unk> <s>", ""])
def test_a_raw_prompt_has_the_tokens_before_a_text_but_no_end_token(
    prefix: str, tmp_path: Path
) -> None:
    """After EOS, a model does not continue the text."""
    tokenizer = _byte_level()
    single = f"{prefix} $A </s>".strip()
    special = [(name, tokenizer.token_to_id(name)) for name in SPECIAL if name in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    prompts = _prompts(_loaded(_folder(tmp_path / "it", tokenizer)))
    first = [tokenizer.token_to_id(name) for name in prefix.split()]
    text = "the quick brown fox"
    tokens = [*first, *tokenizer.encode(text, add_special_tokens=False).ids]
    assert prompts.build(RawPrompt(text)).tokens == tokens
    assert prompts.encode_open(text) == tokens
    if prefix == "<s>":  # which the text may already contain
        assert prompts.build(RawPrompt("<s>" + text)).tokens == tokens


TURN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": {"chat_template": TURN}},
        {"processor_config.json": {"chat_template": TURN}},
        {"chat_template.json": {"chat_template": [{"name": "default", "template": TURN}]}},
        {"tokenizer": {"chat_template": None}, "chat_template.json": {"chat_template": TURN}},
        {"tokenizer": {"chat_template": [{"name": "default", "template": TURN}]}},
        # Names of modules that another version of mlx-lm has, or that lead out of the package.
        {"tokenizer": {"chat_template": TURN, "chat_template_type": "gemma4"}},
        {"tokenizer": {"chat_template": TURN, "chat_template_type": ".utils"}},
        {"tokenizer": {"chat_template": TURN, "tool_parser_type": "gemma5"}},
    ],
    ids=lambda files: json.dumps(files)[:60],
)
def test_a_template_is_found_wherever_it_is(files: dict[str, Any], tmp_path: Path) -> None:
    folder = _folder(tmp_path / "it", _byte_level(), **files.pop("tokenizer", {}))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    prompts = _prompts(_loaded(folder))
    assert prompts.render(ChatPrompt(({"role": "user", "content": "Hello"},))) == "[Hello]"
