"""Household steps a second, fast engine against stock TextWorld: the same games and commands, interleaved in one run.

Prints medians of the repeats and their spread, cold (every transition new) and inside a group of eight episodes that
share transitions, and writes runs/bench/household.json.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from pathlib import Path

import textworld

from seedkit.envs import Household, make, spread
from seedkit.io import atomic_write
from seedkit.types import Task

GAMES, STEPS, REPEATS, GROUP = 6, 15, 5, 8


def commands(task: Task, rng: random.Random, player: Household) -> list[str]:
    """A random walk through a game, biased to what a player does: half of it follows the planner's walkthrough."""
    now, walk, left = player.reset(task), [], list(task.spec["walkthrough"])
    while len(walk) < STEPS and not now.done:
        follow = left and left[0] in now.admissible and rng.random() < 0.5
        command = left.pop(0) if follow else rng.choice(now.admissible or ())
        walk.append(command)
        now = player.step(command)
    return walk


def play(players: list[Household], task: Task, walks: list[list[str]]) -> tuple[int, float]:
    """(steps, seconds) of the walks; loading and resetting are not counted."""
    count, seconds = 0, 0.0
    for player, walk in zip(players, walks, strict=True):
        player.reset(task)
        begin = time.perf_counter()
        for command in walk:
            player.step(command)
        seconds += time.perf_counter() - begin
        count += len(walk)
    return count, seconds


def main() -> None:
    """Measure and print."""
    tasks = spread(make("household").panel("valid_seen"), GAMES)
    ratios: dict[str, list[float]] = {"cold": [], f"group of {GROUP}": []}
    speeds: dict[str, list[float]] = {"stock": [], "fast, cold": [], f"fast, group of {GROUP}": []}
    for repeat in range(REPEATS):
        totals = {name: [0, 0.0] for name in speeds}
        for task in tasks:
            rng = random.Random(f"{repeat}-{task.id}")
            walk = commands(task, rng, make("household"))
            # members of a GRPO group mostly agree: six take one walk, two take walks of their own
            walks = [walk] * (GROUP - 2) + [commands(task, rng, make("household")) for _ in range(2)]
            fast = make("household")
            for name, players, told in (
                ("stock", [make("household", engine="stock")], [walk]),
                ("fast, cold", [make("household")], [walk]),
                (f"fast, group of {GROUP}", [fast.clone() for _ in range(GROUP)], walks),
            ):
                count, seconds = play(players, task, told)
                totals[name][0] += count
                totals[name][1] += seconds
        rate = {name: count / seconds for name, (count, seconds) in totals.items()}
        for name, value in rate.items():
            speeds[name].append(value)
        ratios["cold"].append(rate["fast, cold"] / rate["stock"])
        ratios[f"group of {GROUP}"].append(rate[f"fast, group of {GROUP}"] / rate["stock"])
    print(
        f"household steps, {GAMES} games × {STEPS} steps × {REPEATS} repeats; textworld {textworld.__version__}, ",
        end="",
    )
    print(f"Python {platform.python_version()}, {platform.machine()}")
    for name, values in speeds.items():
        print(f"  {name:20} {statistics.median(values):8.0f} steps/s  ({min(values):.0f}–{max(values):.0f})")
    for name, values in ratios.items():
        print(f"  ratio to stock, {name:12} {statistics.median(values):6.1f}×  ({min(values):.1f}–{max(values):.1f})")
    atomic_write(
        Path("runs/bench/household.json"), json.dumps({"steps_per_second": speeds, "ratio": ratios}, indent=1)
    )


if __name__ == "__main__":
    main()
