"""Intervals: hand-worked numbers, determinism, coverage, pairing, refusals."""

import math

import numpy as np
import pytest

from seedkit.stats import bootstrap_interval, paired_difference


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


def test_repeated_outcomes_add_nothing():
    """Repeating the same outcomes as further runs adds no tasks, so it must not narrow the interval."""
    values = np.random.default_rng(2).random(30)
    once, often = bootstrap_interval(values), bootstrap_interval(np.stack([values] * 5))
    assert often.mean == pytest.approx(once.mean)
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.1)  # Student's t for the percentiles


def test_several_runs_by_hand():
    """Runs of means .2 and .4 whose tasks are all alike: t with one degree of freedom, 12.706 · .1."""
    mean, low, high = bootstrap_interval([[0.2] * 50, [0.4] * 50], resamples=200_000)
    assert mean == pytest.approx(0.3)
    assert (low, high) == pytest.approx((0.3 - 1.2706, 0.3 + 1.2706), abs=0.05)


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


def test_pairs_have_the_same_tasks_and_runs():
    result = paired_difference([[1.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]])
    assert result.mean == pytest.approx(0.25)  # 1, 0, 1, -1
    assert result.improvement == pytest.approx((1 + 0.5 + 1 + 0.5 + 1 + 0 + 1 + 0) / 8)
    with pytest.raises(ValueError, match="a has 1 runs of 3 tasks but b 1 of 2"):
        paired_difference([1, 0, 1], [1, 0])
    with pytest.raises(ValueError, match="same task and seed"):
        paired_difference([[1.0, 0.0]] * 2, [[1.0, 0.0]])


@pytest.mark.parametrize("seed_sd", [0.0, 0.08])
@pytest.mark.parametrize("task_sd", [0.0, 0.25])
def test_the_paired_interval_covers_as_often_as_it_says(seed_sd, task_sd):
    """Bernoulli outcomes of two methods, 5 runs on 60 tasks; runs and tasks differ in difficulty or do not."""
    random, trials, runs, tasks = np.random.default_rng(5), 2000, 5, 60

    def successes(gain: float, base: np.ndarray) -> np.ndarray:
        p = base + gain + seed_sd * random.uniform(-1, 1, (runs, 1)) * 3**0.5
        return random.random((runs, tasks)) < p

    covered = 0
    for trial in range(trials):
        base = random.uniform(-1, 1, tasks) * task_sd  # a task's own difficulty, and its own gain
        gain = 0.1 + random.uniform(-1, 1, tasks) * task_sd / 2
        found = paired_difference(
            successes(gain, 0.45 + base / 2), successes(0.0, 0.45 + base / 2), resamples=1000, seed=trial
        )
        covered += found.low <= 0.1 <= found.high
    assert 0.93 <= covered / trials <= 0.97


@pytest.mark.parametrize("values", [[], [[[1.0]]], [1.0, float("nan")], [1.0, float("inf")]])
def test_values_that_are_none_are_refused(values):
    with pytest.raises(ValueError, match="values must be"):
        bootstrap_interval(values)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_probability(confidence):
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        bootstrap_interval([1.0, 0.0], confidence=confidence)
