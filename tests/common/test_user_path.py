"""Paths as users type them."""

from __future__ import annotations

from pathlib import Path

from common.user_path import user_path


def test_a_tilde_is_the_home_folder_of_a_known_user() -> None:
    assert user_path("~/models") == Path.home() / "models"
    assert user_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert user_path("models") == Path("models")
