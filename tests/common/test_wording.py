"""Sentences name the word that was meant, and quote no more than fits."""

from common.wording import did_you_mean, nearest, shown


def test_nearest_key_ignores_case_and_dashes() -> None:
    known = ("parallel", "max_queue")
    assert nearest("Max-Queue", known) == "max_queue"
    assert nearest("paralel", known) == "parallel"
    assert nearest("zzz", known) is None
    assert did_you_mean("paralel", known) == "; did you mean 'parallel'?"
    assert did_you_mean("zzz", known) == ""


def test_long_values_are_cut_in_messages() -> None:
    assert len(shown("x" * 10_000)) == 80
