"""Stop texts end an answer at the same place however its text is cut into pieces, and no part of them is shown."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launcher.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """All text that is shown, and the stop text that was met."""
    stops = StopStrings(stop, include)
    shown = "".join(stops.feed(piece) for piece in pieces)
    return shown + (stops.finish() if stops.matched is None else ""), stops.matched


def test_a_stop_text_across_pieces_is_cut_off_with_all_that_follows() -> None:
    assert run(["</answer>"], ["It is 4", "2.</", "ans", "wer> and", " more"]) == ("It is 42.", "</answer>")


def test_a_stop_text_may_be_included() -> None:
    assert run(["\n\n", "END"], ["one E", "ND two"], include=True) == ("one END", "END")


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    stops = StopStrings(["stop!", "top secret"], include=False)
    assert stops.feed("Don't st") == "Don't "
    assert stops.feed("op") == ""
    assert stops.feed(" s") == "s"  # "top s" may still begin the second one
    assert stops.feed("o far") == "top so far"
    assert stops.feed(" to") == " "
    assert stops.finish() == "to"
    assert stops.matched is None


def test_without_stop_texts_everything_passes_at_once() -> None:
    assert StopStrings([], include=False).feed("abc") == "abc"


def test_a_text_that_repeats_its_own_beginning_is_still_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_the_stop_text_that_is_complete_first_wins_and_of_equals_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_after_the_end_nothing_more_is_shown() -> None:
    stops = StopStrings(["."], include=True)
    assert stops.feed("Yes. No.") == "Yes."
    assert stops.feed("more") == ""
    assert stops.finish() == ""


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@settings(deadline=None, max_examples=300)
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8), st.booleans())
def test_how_the_text_is_cut_changes_nothing(stop: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    shown, matched = run(stop, pieces, include)
    assert (shown, matched) == run(stop, [text], include) == run(stop, list(text), include)
    if matched is None:
        assert shown == text
        assert not any(each in text for each in stop)
    else:
        assert text.startswith(shown if include else shown + matched)
        assert not include or shown.endswith(matched)


@settings(deadline=None, max_examples=300)
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
def test_what_is_shown_early_is_never_part_of_a_stop_text_and_never_less_than_it_could_be(
    stop: list[str], pieces: list[str]
) -> None:
    stops = StopStrings(stop, include=False)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += stops.feed(piece)
        if stops.matched is not None:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(each.startswith(held) for each in stop)
        assert not any(each.startswith(shown[-1:] + held) for each in stop) or shown == ""
