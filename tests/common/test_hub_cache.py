"""The folder of downloads, as hosts configure it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.hub_cache import NoHome, hub_cache


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HOME": "/m", "HUGGINGFACE_HUB_CACHE": "/m"}, "/m"),
        ({"HF_HOME": "/m", "HUGGINGFACE_HUB_CACHE": "/m", "HF_HUB_CACHE": "/h"}, "/h"),
        ({"HF_HOME": "/m"}, "/m/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_environment_says(environ: dict[str, str], expected: str) -> None:
    assert hub_cache(environ) == Path(expected)


def test_a_user_without_a_home_folder_is_told_what_to_set(homeless: None) -> None:
    with pytest.raises(NoHome, match="set HF_HOME to a folder"):
        hub_cache({})
    assert hub_cache({"HF_HOME": "/m"}) == Path("/m/hub")


def test_the_default_cache_is_the_hub_clients_own() -> None:
    assert hub_cache({}) == Path.home() / ".cache" / "huggingface" / "hub"
