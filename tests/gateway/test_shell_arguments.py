"""The command line: valid arguments, and messages for invalid ones."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from gateway.arguments import KEYS_VARIABLE, BadArgument, flag_of, settings_from
from gateway.models.reading import single
from gateway.settings import GatewaySettings, is_loopback
from tests.gateway.doc_tables import refused_table, settings_table
from tests.gateway.gateway_process import ROOT

KEY = "a-long-enough-key"


def read(tmp_path: Path, *arguments: str, **environ: str) -> GatewaySettings:
    return settings_from(["--models-dir", str(tmp_path), *arguments], environ)


def test_sizes_durations_and_switches(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        *("--max-body-bytes", "1.5MiB", "--max-memory-bytes", "8G", "--idle-unload", "0.5"),
        *("--port", "0", "--allow-remote-images", "--cors-origin", "HTTP://Localhost:3000/"),
        *("--cors-origin", "app://obsidian.md"),
        *("--cors-origin", "null"),
    )
    assert settings.max_body_bytes == 3 << 19
    assert settings.max_memory_bytes == 8 << 30
    assert (settings.idle_unload, settings.port) == (0.5, 0)
    assert settings.allow_remote_images
    assert settings.cors_origins == ("http://localhost:3000", "app://obsidian.md", "null")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), (".5", 0.5), ("250ms", 0.25), ("5m", 300), ("1.5 h", 5400)]
)
def test_a_duration_has_a_unit(text: str, seconds: float, tmp_path: Path) -> None:
    assert read(tmp_path, "--idle-unload", text).idle_unload == seconds


def test_settings_of_a_model_belong_to_one_model(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="--model-setting belongs to --model"):
        read(tmp_path, "--model-setting", "context_size=1")


def test_settings_on_the_command_line_are_keys_of_a_model_file() -> None:
    given = ["context_size=9", "parameters.temperature=0", "engine_args.parallel=2"]
    (model,) = single("a/b", [*given, 'draft_model="7"', "parameters.top_p = 0.5"]).models
    assert (model.context_size, model.engine_args, model.draft_model) == (9, {"parallel": 2}, "7")
    assert (model.parameters.temperature, model.parameters.top_p) == (0, 0.5)


def test_a_folder_answers_to_its_own_name_and_to_the_typed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my müdel"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    (model,) = single("./my müdel/").models
    assert model.name == "my-m-del"
    assert model.aliases == ["./my müdel/", "./my müdel", "my müdel"]
    (model,) = single("~nobody-of-this-name/x").models
    assert model.parameters.model == "~nobody-of-this-name/x"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("context_size", "write KEY=VALUE"),
        ("context_size=[", "'[' is not YAML"),
        ("context_size=big", "context_size is 'big'"),
        ("context_sise=1", "did you mean 'context_size'?"),
        ("temperature=1", "write `parameters: {temperature: …}`"),
        ("name.x=1", "name is not a section"),
    ],
)
def test_a_setting_that_no_model_file_may_have_is_refused(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        single("a/b", [setting])


def test_keys_come_from_three_places_and_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{KEY}\n\nanother-long-key\n")
    settings = read(
        tmp_path, "--api-key-file", str(file), **{KEYS_VARIABLE: f"{KEY}, third-long-key"}
    )
    assert settings.api_keys == (KEY, "third-long-key", "another-long-key")
    assert read(tmp_path, "--api-key", KEY).api_keys == (KEY,)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "http"], "--port is 'http': give a whole number"),
        (["--port", "70000"], "--port is 70000: give at least 0 and at most 65535"),
        (
            ["--idle-unload", "nan"],
            "--idle-unload is 'nan': give seconds, or a time such as 5m",
        ),
        (["--max-body-bytes", "big"], "--max-body-bytes is 'big': give bytes, or a size"),
        (["--max-body-bytes", "3"], "--max-body-bytes is 3: give at least 1024"),
        (["--host", ""], "--host is empty"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached by others, and there is no API key"),
        (["--host", "::"], "--host :: can be reached by others"),
        (["--host", "example.org"], "--host example.org can be reached by others"),
        (["--cors-origin", "*"], "--cors-origin * lets every web page call"),
        (["--cors-origin", "localhost"], "--cors-origin is 'localhost': give one such as"),
        (["--cors-origin", "localhost:3000"], "--cors-origin is 'localhost:3000'"),
        (["--cors-origin", "https://a.b/c"], "--cors-origin is 'https://a.b/c'"),
        (["--api-key", "short"], "an API key is shorter than 8 characters"),
        (["--api-key", "with a space in it"], "an API key contains a space"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys cannot be read"),
        (["--models-dir", "/nowhere"], "--models-dir is '/nowhere': there is no such folder"),
        (["--models"], "No such option '--models'"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_message(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    with pytest.raises(BadArgument, match=re.escape(sentence)):
        read(tmp_path, *arguments)


def test_a_refused_key_is_not_in_its_message(tmp_path: Path) -> None:
    for bad in ("sEcReT", "sEcReT with spaces"):
        with pytest.raises(BadArgument) as raised:
            read(tmp_path, "--api-key", bad)
        assert "sEcReT" not in str(raised.value)


def test_a_key_allows_addresses_beyond_loopback(tmp_path: Path) -> None:
    settings = read(tmp_path, "--host", "0.0.0.0", "--cors-origin", "*", **{KEYS_VARIABLE: KEY})
    assert (settings.host, settings.cors_origins) == ("0.0.0.0", ("*",))


def test_an_empty_key_file_does_not_open_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(BadArgument, match="has no key"):
        read(tmp_path, "--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.168.0.1", "localhost.evil.org"])
def test_addresses_that_others_can_reach(host: str) -> None:
    assert not is_loopback(host)


def documented(name: str) -> str:
    """The table with this name in docs/gateway.md."""
    text = (ROOT / "docs" / "gateway.md").read_text("utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def test_the_docs_list_every_refused_field() -> None:
    assert documented("refused") == refused_table()


def test_every_setting_has_a_flag_and_a_row_in_the_docs() -> None:
    assert documented("settings") == settings_table()
    for row in fields(GatewaySettings):
        assert f"`{flag_of(row)}`" in settings_table()


def test_every_setting_can_be_set_in_the_environment(tmp_path: Path) -> None:
    environ = {
        "MLX_GATEWAY_MODELS_DIR": str(tmp_path),
        "MLX_GATEWAY_MAX_BODY_BYTES": "10MiB",
        "MLX_GATEWAY_STRICT": "true",
        "MLX_GATEWAY_ALLOW_REMOTE_IMAGES": "0",
        "MLX_GATEWAY_CORS_ORIGINS": "http://a:1, http://b:2",
        "MLX_GATEWAY_PORT": "9000",
        "MLX_GATEWAY_LOAD_TIMEOUT": "",
    }
    settings = settings_from(["--port", "9001"], environ)
    assert (settings.max_body_bytes, settings.strict, settings.port) == (10 << 20, True, 9001)
    assert settings.cors_origins == ("http://a:1", "http://b:2")
    assert not settings.allow_remote_images
    assert settings.load_timeout == settings_from(["--models-dir", str(tmp_path)], {}).load_timeout


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("STRICT", "perhaps", "MLX_GATEWAY_STRICT is 'perhaps'"),
        ("PORT", "many", "--port is 'many'"),
        ("API_KEY", "misspelled", "MLX_GATEWAY_API_KEY is not a setting"),
        ("API_KEY_FILE", "/nowhere", "--api-key-file /nowhere cannot be read"),
    ],
)
def test_an_impossible_variable_is_refused(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    with pytest.raises(BadArgument, match=re.escape(words)):
        read(tmp_path, **{f"MLX_GATEWAY_{name}": text})


def test_keys_from_a_file_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice alices-own-key\n")
    settings = read(tmp_path, MLX_GATEWAY_API_KEY_FILE=str(file))
    assert settings.api_keys == ("alice alices-own-key",)
