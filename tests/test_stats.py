"""Intervals: hand-worked numbers, determinism, coverage, pairing, refusals."""

import math

import numpy as np
import pytest

from seedkit.stats import bootstrap_interval, paired_difference, wilson_interval


def test_bootstrap_of_success_rates_has_the_known_width():
    # 128 tasks at p = .8: se = √(.8·.2/128) = .0354, so the 95 % interval is about ±.069
    successes = [1.0] * 102 + [0.0] * 26
    mean, low, high = bootstrap_interval(successes)
    assert mean == pytest.approx(102 / 128)
    assert low == pytest.approx(mean - 0.0695, abs=0.008)
    assert high == pytest.approx(mean + 0.0695, abs=0.008)
    narrow = bootstrap_interval(successes, confidence=0.5)
    assert low < narrow.low < mean < narrow.high < high


def test_bootstrap_is_deterministic():
    values = np.random.default_rng(1).random(40)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values) != bootstrap_interval(values, seed=1)


def test_bootstrap_resamples_tasks_not_seeds():
    """Repeating the same outcomes as further seeds adds no tasks, so it must not narrow the interval."""
    values = np.random.default_rng(2).random(30)
    assert bootstrap_interval(np.stack([values] * 5)) == pytest.approx(bootstrap_interval(values))
    # tasks that are all alike once seeds are averaged leave nothing to resample
    mean, low, high = bootstrap_interval([[1.0, 0.0], [0.0, 1.0]])
    assert (mean, low, high) == (0.5, 0.5, 0.5)


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    random = np.random.default_rng(3)
    intervals = [bootstrap_interval(random.normal(size=60), resamples=400, seed=i) for i in range(200)]
    assert 0.90 <= np.mean([i.low <= 0 <= i.high for i in intervals]) <= 0.99


def test_one_task_has_no_interval():
    mean, low, high = bootstrap_interval([[1.0], [0.0]])
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_paired_difference_by_hand():
    result = paired_difference([1, 1, 0, 1], [0, 1, 0, 0])
    assert result.mean == 0.5  # (1 + 0 + 0 + 1) / 4
    assert result.improvement == 0.75  # wins 1, ½, ½, 1
    assert 0 <= result.low < 0.5 < result.high <= 1
    mirrored = paired_difference([0, 1, 0, 0], [1, 1, 0, 1])
    assert (mirrored.mean, mirrored.improvement) == (-0.5, 0.25)


def test_pairing_removes_what_the_tasks_share():
    difficulty = np.random.default_rng(4).random(50)
    result = paired_difference(difficulty + 0.1, difficulty)
    assert (result.mean, result.low, result.high) == pytest.approx((0.1, 0.1, 0.1))
    assert result.improvement == 1.0


def test_alike_is_no_improvement():
    values = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]
    assert paired_difference(values, values) == pytest.approx((0.0, 0.0, 0.0, 0.5))


def test_seeds_may_differ_tasks_may_not():
    a, b = [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0]]
    result = paired_difference(a, b)
    assert result.mean == pytest.approx(1 / 3)  # task means 1, 2/3 against 0, 1: (1 - 1/3) / 2
    assert result.improvement == pytest.approx((1 + 1 + 1 + 0.5 + 0 + 0.5) / 6)
    with pytest.raises(ValueError, match="a has 3 tasks but b has 2"):
        paired_difference([1, 0, 1], [1, 0])


def test_wilson_by_hand():
    # 8 of 10, z = 1.959964: centre (.8 + z²/20)/(1 + z²/10) = .716731, half width .226599
    mean, low, high = wilson_interval(8, 10)
    assert (mean, low, high) == pytest.approx((0.8, 0.490162, 0.943318), abs=1e-5)


def test_wilson_at_the_ends():
    # none of n: the upper limit is z² / (n + z²) = 3.841459 / 13.841459
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.0, 0.277533), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((1.0, 1 - 0.277533, 1.0), abs=1e-5)
    assert wilson_interval(10, 10, confidence=0.5).low > wilson_interval(10, 10).low


@pytest.mark.parametrize("values", [[], [[[1.0]]], [1.0, float("nan")], [1.0, float("inf")]])
def test_values_that_are_none_are_refused(values):
    with pytest.raises(ValueError, match="values must be"):
        bootstrap_interval(values)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_probability(confidence):
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        bootstrap_interval([1.0, 0.0], confidence=confidence)
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        wilson_interval(1, 2, confidence=confidence)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="need 0 <= successes <= n"):
        wilson_interval(successes, n)
