"""Intervals for success rates and returns: bootstrap over tasks, paired differences, Wilson.

Implements percentile bootstrap intervals that resample tasks (the unit that is drawn; a task's seeds are averaged
first), the probability of improvement of Agarwal et al., and Wilson's score interval for one proportion.
Leaves out seed-to-seed variance as a level of its own, tests of significance and corrections for many comparisons.

Results are deterministic: the resampling seed is an argument.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Values = Sequence | np.ndarray
"""One number a task [tasks], or [seeds, tasks]."""


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


def bootstrap_interval(values: Values, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean over tasks with a percentile bootstrap interval.

    Args:
        values: [tasks] or [seeds, tasks], e.g. 1.0 for a success.
        confidence: coverage, between 0 and 1.
        resamples: bootstrap samples of the tasks.
        seed: of the resampling.
    Returns:
        mean, low, high. With a single task low and high are NaN: it says nothing about other tasks.
    Raises:
        ValueError: no values, other dimensions, values that are not finite, or confidence outside (0, 1).
    Source: Agarwal et al., arXiv 2108.13264.
    Deviates: they resample the runs of each task; here the tasks, as a panel is a sample of tasks.
    """
    tasks = _by_task(values).mean(0)
    return Interval(float(tasks.mean()), *_limits(tasks, confidence, resamples, seed))


def paired_difference(
    a: Values, b: Values, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Difference:
    """Mean of a - b over the same tasks, with a percentile bootstrap interval over tasks.

    Args:
        a, b: [tasks] or [seeds, tasks], column i the same task in both; the numbers of seeds may differ.
        confidence, resamples, seed: as `bootstrap_interval`.
    Returns:
        mean, low, high, improvement. improvement is the share of (task, seed of a, seed of b) in which a is larger,
        ties counting half: 0.5 when a and b are alike.
    Raises:
        ValueError: different numbers of tasks, or as `bootstrap_interval`.
    Source: probability of improvement as in Agarwal et al., arXiv 2108.13264.
    """
    a, b = _by_task(a), _by_task(b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has {a.shape[1]} tasks but b has {b.shape[1]}: a pair needs the same task in both")
    tasks = a.mean(0) - b.mean(0)
    wins = (np.sign(a[:, None] - b[None]) + 1) / 2
    return Difference(float(tasks.mean()), *_limits(tasks, confidence, resamples, seed), float(wins.mean()))


def wilson_interval(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion: usable at 0 and 1 and for few trials, unlike p ± z·se.

    Args:
        successes: trials that succeeded.
        n: trials, at least 1.
        confidence: coverage, between 0 and 1.
    Returns:
        mean (successes / n), low, high.
    Raises:
        ValueError: n < 1, successes outside 0..n, or confidence outside (0, 1).
    Source: Wilson, J. Am. Stat. Assoc. 22 (1927).
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = NormalDist().inv_cdf(1 - _tail(confidence))
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def _by_task(values: Values) -> np.ndarray:
    """[seeds, tasks] as float64."""
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"values must be [tasks] or [seeds, tasks] and not empty, got shape {np.shape(values)}")
    if not np.isfinite(array).all():
        raise ValueError("values must be finite: a missing run is no value")
    return array


def _limits(tasks: np.ndarray, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    tail = _tail(confidence)
    if len(tasks) < 2:
        return math.nan, math.nan
    draws = np.random.default_rng(seed).integers(len(tasks), size=(resamples, len(tasks)))
    low, high = np.quantile(tasks[draws].mean(1), [tail, 1 - tail])
    return float(low), float(high)


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return (1 - confidence) / 2
