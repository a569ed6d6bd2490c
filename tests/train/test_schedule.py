"""The learning rate's end points, shape and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.train.schedule import Schedule

schedules = st.builds(
    Schedule,
    peak=st.floats(1e-5, 1.0),
    steps=st.integers(1, 5000),
    kind=st.sampled_from(["cosine", "wsd"]),
    warmup_share=st.floats(0, 1),
    floor_share=st.floats(0, 1),
    decay_share=st.floats(0, 1),
)


@given(schedules, st.integers(0, 6000))
def test_rises_to_the_peak_then_never_rises_again(s: Schedule, step: int) -> None:
    assert s(s.warmup - 1) == pytest.approx(s.peak)
    if step < s.warmup - 1:
        assert s(step) < s(step + 1)
    elif step >= s.warmup:
        assert s(step + 1) <= s(step) * (1 + 1e-12)
        assert s.peak * s.floor_share <= s(step) * (1 + 1e-12) and s(step) <= s.peak * (1 + 1e-12)
    if s.warmup < s.steps:
        assert s(s.steps - 1) == pytest.approx(s.peak * s.floor_share)


def test_the_reports_cosine() -> None:
    s = Schedule(peak=2.0, steps=1001)
    assert s.warmup == 11 and s(0) == pytest.approx(2.0 / 11) and s(10) == 2.0
    assert s(505) == pytest.approx(1.1)  # half way between step 10 and step 1000: the mean of peak and floor
    assert s(1000) == pytest.approx(0.2) == s(10**6)


def test_wsd_is_flat_then_linear() -> None:
    s = Schedule(peak=1.0, steps=100, kind="wsd", floor_share=0.0)
    assert {s(i) for i in range(79)} == {1.0}
    assert [s(79), s(89), s(99)] == pytest.approx([1.0, 0.5, 0.0])


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="linear"):
        Schedule(1.0, 10, kind="linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"floor_share.*1\.5"):
        Schedule(1.0, 10, floor_share=1.5)
    with pytest.raises(ValueError, match="0"):
        Schedule(1.0, 0)
