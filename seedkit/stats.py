"""Intervals for success rates and returns, and paired differences: what another panel and other runs would give.

Both the tasks of a panel and the runs of a method are samples. One run: a percentile bootstrap over the tasks, which
says nothing about other runs. Several runs: a parametric bootstrap of the two-way random-effects model (run, task,
rest), since resampling five runs covers too seldom (test_stats has the coverage; LOG.md the alternatives). Also the
probability of improvement of Agarwal et al. Leaves out tests of significance, corrections for many comparisons.

Results are deterministic: the resampling seed is an argument.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Values = Sequence | np.ndarray
"""One number a task [tasks], or [runs, tasks]: a row a run, its repeated episodes averaged."""


class Interval(NamedTuple):
    """A mean with its lower and upper confidence limit, in the unit of the values."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """Mean of a - b with its limits, and the probability that a beats b on a task (ties count half)."""

    mean: float
    low: float
    high: float
    improvement: float


def bootstrap_interval(
    values: Values, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean with an interval for the mean over all tasks (and, of several runs, over all runs).

    Args:
        values: [tasks] or [runs, tasks], e.g. 1.0 for a success.
        confidence: coverage, between 0 and 1.
        resamples: bootstrap samples.
        seed: of the resampling.
    Returns:
        mean, low, high. With a single task low and high are NaN: it says nothing about other tasks.
    Raises:
        ValueError: no values, other dimensions, values that are not finite, or confidence outside (0, 1).
    Source: several runs: the variance components' generalised confidence interval, Weerahandi, JASA 88 (1993).
    Deviates: Agarwal et al. (arXiv 2108.13264) resample the runs of each task; a panel is a sample of tasks as well.
    """
    values = _by_task(values)
    return Interval(float(values.mean()), *_limits(values, confidence, resamples, seed))


def paired_difference(
    a: Values, b: Values, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Mean of a - b over the same tasks and seeds, with its interval.

    Args:
        a, b: [tasks] or [runs, tasks]; row r the same seed and column i the same task in both.
        confidence, resamples, seed: as `bootstrap_interval`.
    Returns:
        mean, low, high, improvement. improvement is the share of (task, run of a, run of b) in which a is larger,
        ties counting half: 0.5 when a and b are alike.
    Raises:
        ValueError: a and b of different shapes, or as `bootstrap_interval`.
    Source: probability of improvement as in Agarwal et al., arXiv 2108.13264.
    """
    a, b = _by_task(a), _by_task(b)
    if a.shape != b.shape:
        raise ValueError(
            f"a has {a.shape[0]} runs of {a.shape[1]} tasks but b {b.shape[0]} of {b.shape[1]}: "
            "a pair needs the same task and seed in both"
        )
    wins = (np.sign(a[:, None] - b[None]) + 1) / 2
    limits = _limits(a - b, confidence, resamples, seed)
    return Difference(float((a - b).mean()), *limits, float(wins.mean()))


def _by_task(values: Values) -> np.ndarray:
    """[runs, tasks] as float64."""
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"values must be [tasks] or [runs, tasks] and not empty, got shape {np.shape(values)}")
    if not np.isfinite(array).all():
        raise ValueError("values must be finite: a missing run is no value")
    return array


def _limits(values: np.ndarray, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    tail, random = _tail(confidence), np.random.default_rng(seed)
    runs, tasks = values.shape
    if tasks < 2:
        return math.nan, math.nan
    mean = values.mean()
    by_task = values.mean(0)
    if runs == 1:
        means = by_task[random.integers(tasks, size=(resamples, tasks))].mean(1)
    else:
        by_run = values.mean(1, keepdims=True)
        squares = (
            tasks * ((by_run - mean) ** 2).sum(),
            runs * ((by_task - mean) ** 2).sum(),
            ((values - by_run - by_task + mean) ** 2).sum(),
        )
        freedom = (runs - 1, tasks - 1, (runs - 1) * (tasks - 1))
        run, task, rest = (s / random.chisquare(f, resamples) for s, f in zip(squares, freedom, strict=True))
        spread = np.sqrt(np.maximum(run + task - rest, 0) / values.size)
        means = mean + spread * random.standard_normal(resamples)
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return (1 - confidence) / 2
