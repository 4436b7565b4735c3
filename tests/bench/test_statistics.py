import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.bench.statistics import (
    Interval,
    Verdict,
    bootstrap_interval,
    paired_differences,
    saving,
    verdict_word,
)
from slipstream.errors import InputError

SERIES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30)


@settings(deadline=None)
@given(SERIES)
def test_interval_holds_the_median_and_stays_inside_the_data(values: list[float]) -> None:
    found = bootstrap_interval(values)
    assert min(values) <= found.low <= found.high <= max(values)
    assert found.low - 1e-9 <= found.median <= found.high + 1e-9


@settings(deadline=None)
@given(SERIES, st.floats(-100, 100))
def test_a_shift_shifts_the_interval(values: list[float], shift: float) -> None:
    before, after = bootstrap_interval(values), bootstrap_interval([value + shift for value in values])
    assert after.low == pytest.approx(before.low + shift, abs=1e-6)
    assert after.high == pytest.approx(before.high + shift, abs=1e-6)


def test_known_series() -> None:
    found = bootstrap_interval([float(value) for value in range(1, 102)])
    assert found.median == 51
    assert 38 <= found.low < 46
    assert 56 < found.high <= 64


def test_same_seed_same_interval_and_wider_at_a_higher_level() -> None:
    values = [1.0, 4.0, 2.0, 8.0, 5.0, 7.0, 3.0]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    narrow, wide = bootstrap_interval(values, level=0.5), bootstrap_interval(values, level=0.99)
    assert wide.low < narrow.low <= narrow.high < wide.high


def test_one_odd_round_does_not_move_it() -> None:
    assert bootstrap_interval([1.0] * 19 + [500.0]).high == 1.0


def test_one_round_gives_no_interval() -> None:
    with pytest.raises(InputError, match=r"1 round.*at least 2"):
        bootstrap_interval([1.0])


TIMES = st.floats(1e-3, 1e3)
ROUNDS = st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=20)


@settings(deadline=None)
@given(ROUNDS)
def test_what_is_saved_and_what_is_gained_never_contradict(rounds: list[tuple[float, float]]) -> None:
    found = saving([slow for slow, _ in rounds], [fast for _, fast in rounds])
    for name in ("median", "low", "high"):
        saved, gain, longer = (getattr(one, name) for one in (found.saved, found.gain, found.times_as_long))
        assert gain > -1
        assert longer > 0
        if name == "median":
            assert (saved > 0, saved < 0) == (gain > 0, gain < 0) == (longer < 1, longer > 1)
    assert found.gain.low <= found.gain.high


def test_one_estimate_where_the_arms_own_medians_say_otherwise() -> None:
    slower, faster = [0.05, 0.10, 0.30, 0.11, 0.12], [0.04, 0.09, 0.29, 0.25, 0.26]  # the last two beside a neighbour
    found = saving(slower, faster)
    assert found.ours_seconds > found.seconds
    assert found.saved.median == pytest.approx(0.01)
    assert found.gain.median == pytest.approx(0.01 / (0.11 - 0.01))
    assert found.times_as_long.median == pytest.approx(1 - 0.01 / 0.11)
    assert found.times_as_long.low <= found.times_as_long.high


@pytest.mark.parametrize(
    ("holds", "low", "word"), [(None, 1.0, ""), (True, 0.5, "holds"), (True, -0.5, "noise"), (False, -0.5, "off")]
)
def test_verdicts_in_a_word(holds: bool | None, low: float, word: str) -> None:
    assert verdict_word({"holds": holds, "saved_low": low, "saved_high": 2.0}) == word


def test_differences_are_taken_within_a_round() -> None:
    assert paired_differences([5.0, 9.0], [4.0, 6.0]) == [1.0, 3.0]
    with pytest.raises(ValueError):
        paired_differences([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("predicted", "holds"),
    [(10.0, True), (8.0, True), (12.0, True), (11.9, True), (8.01, True), (7.9, False), (12.1, False), (-10.0, False)],
)
def test_prediction_within_a_fifth_of_the_middle_holds(predicted: float, holds: bool) -> None:
    assert Verdict(predicted, Interval(10.1, 9.5, 10.5)).holds is holds


def test_prediction_in_a_wide_interval_holds() -> None:
    assert Verdict(5.0, Interval(10.0, 4.0, 16.0)).holds
    assert not Verdict(3.9, Interval(10.0, 4.0, 16.0)).holds


def test_ratio_is_measured_over_predicted() -> None:
    assert Verdict(4.0, Interval(3.0, 2.0, 5.0)).ratio == 0.75
    assert Verdict(0.0, Interval(3.0, 2.0, 5.0)).ratio is None
