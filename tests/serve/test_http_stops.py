"""Stop strings: what is shown is decided by the characters alone, and no part of a stop string is ever shown."""

from hypothesis import given
from hypothesis import strategies as st

from perilune.serve.stops import Stops

letters = st.text(alphabet="abc", max_size=24)
strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def shown(stops: Stops, pieces: list[str]) -> str:
    return "".join(map(stops.push, pieces)) + ("" if stops.found else stops.flush())


def first_completed(text: str, strings: list[str]) -> int | None:
    """Where the text is cut by a reader who takes one character at a time and prefers the longest string."""
    for end in range(1, len(text) + 1):
        ending = [len(stop) for stop in strings if text[:end].endswith(stop)]
        if ending:
            return end - max(ending)
    return None


@given(strings, st.lists(letters, max_size=8))
def test_the_cut_is_where_a_reader_of_characters_stops(strings: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    cut = first_completed(text, strings)
    stops = Stops(strings)
    assert shown(stops, pieces) == text[:cut]
    assert (stops.found is not None) == (cut is not None)


@given(strings, letters)
def test_what_is_shown_is_safe_however_the_text_goes_on_and_nothing_more_is_held(strings: list[str], text: str) -> None:
    stops = Stops(strings)
    out = stops.push(text)
    for ending in [stop[n:] for stop in strings for n in range(len(stop))]:
        cut = first_completed(text + ending, strings)
        assert cut is None or len(out) <= cut
    if stops.found is None:
        held = text[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in strings)


def test_text_without_stop_strings_is_not_held() -> None:
    assert Stops(()).push("</s") == "</s"


def test_a_flush_gives_back_what_was_held_in_vain() -> None:
    stops = Stops(["END"])
    assert [stops.push("x EN"), stops.flush(), stops.push("D y END z")] == ["x ", "EN", "D y "]
    assert stops.found == "END"
