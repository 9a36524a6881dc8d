"""Recorded results in data/results: they are of today's panels and methods; one of their jobs can be made again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from seedkit.envs import make, panel_hash, spread
from seedkit.envs.base import data_dir
from seedkit.envs.household_games import household_task, sample_specs
from seedkit.envs.household_policy import EASY
from seedkit.experiment import Arm, Outcome, Plan, read_results, run
from seedkit.io import read_trajectories
from seedkit.policy import load_policy
from seedkit.train import Stage2Config

FILES = sorted((data_dir() / "results").glob("*.jsonl"))  # ENV.jsonl or ENV-something.jsonl


def plan_of(outcome: Outcome, path: Path) -> Plan:
    """The plan that a recorded protocol describes, from committed panels and the policy that its file is named by."""
    name, protocol = path.stem.split("-")[0], outcome.final.protocol["training"]
    env, start = make(name), f"{name}-tiny-stage1"
    splits = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
    panels = {name: spread(env.panel(split), protocol[name]["count"]) for name, split in splits.items()}
    assert {n: panel_hash(tasks) for n, tasks in panels.items()} == {n: protocol[n]["panel"] for n in panels}
    assert load_policy(start).version == protocol["start"]
    fields = (
        "updates",
        "tasks",
        "group",
        "lr",
        "kl_coef",
        "invalid_penalty",
        "max_steps",
        "temperature",
        "max_new_tokens",
    )
    options = {"environment": name, "episodes": protocol["test_episodes"], "eval_every": protocol["eval_every"]}
    return Plan(start, **panels, config=Stage2Config(**{f: protocol[f] for f in fields}), **options)


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_results_are_of_what_is_here(path):
    outcomes = read_results(path)
    plan_of(outcomes[0], path)
    for outcome in outcomes:
        assert Arm.parse(outcome.arm).settings == outcome.settings, outcome.arm
        updates = outcome.final.protocol["training"]["updates"] if outcome.settings["method"] else 0
        assert {len(values) for values in outcome.curves.values()} <= {updates}


@pytest.mark.parametrize("name", ["run", "first-run"])
def test_the_runs_of_smollm2_are_of_what_is_here(name):
    """Their starts are no files of ours, their games are made by notebook 11; arms and games are held here."""
    outcomes = read_results(data_dir() / "results" / "smollm2" / f"{name}.jsonl")
    protocol = outcomes[0].final.protocol["training"]
    for part, split, count, seed in (("train", "train", 48, 4), ("test", "valid_unseen", 36, 1)):
        games = [household_task(split, spec, []) for spec in sample_specs(split, count, seed, **EASY)]
        assert panel_hash(games) == protocol[part]["panel"]
    for outcome in outcomes:
        assert Arm.parse(outcome.arm).settings == outcome.settings, outcome.arm


@pytest.mark.parametrize(("name", "won"), [("episodes", "001010"), ("first-episodes", "100000")])
def test_episodes_of_smollm2_end_as_the_notebook_says(name, won):
    episodes = read_trajectories(data_dir() / "results" / "smollm2" / f"{name}.jsonl")
    assert "".join(str(int(t.success)) for t in episodes) == won


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_job_can_be_made_again(path, tmp_path):
    """One job of the file, drawn by its size: here to the last digit, on another kind of machine arithmetic differs.

    Stated tolerance there: the first update's success is the same (it samples before anything is learnt), the test's
    success is within ten points, about the spread between seeds.
    """
    outcomes = [o for o in read_results(path) if o.settings["method"]]
    recorded = random.Random(len(outcomes)).choice(outcomes)
    (again,) = run([Arm.parse(recorded.arm)], [recorded.seed], plan_of(recorded, path), tmp_path, processes=1)
    print(recorded.arm, recorded.seed, "to the last digit:", again.curves == recorded.curves)
    assert again.curves["success"][0] == recorded.curves["success"][0]
    assert again.final.by_task.mean() == pytest.approx(recorded.final.by_task.mean(), abs=0.1)
