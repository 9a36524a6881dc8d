"""The embedded policies are what their cards say: mediocre, helped by the right skill, and by nothing else.

A card's 216 tasks an arm are recorded task by task (`measured.jsonl`). Some of them are played again here and go as
recorded; the whole is a slow test.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from seedkit.envs import make, spread
from seedkit.envs.base import data_dir
from seedkit.envs.tiny import Organism, analyzer_accuracy, arms, examine, organism, teach_repeatedly
from seedkit.policy import load_policy
from seedkit.rollout import collect

NAMES = [p.name.removesuffix("-tiny") for p in sorted((data_dir() / "policies").glob("*-tiny"))]
PLAYED = 48  # of 216 tasks, kinds in equal shares
ARMS = ["unprompted", "right skill", "another kind's skill", "text without advice", "wrong skill"]
TAUGHT = "unprompted, after Stage 1, run 1"


@pytest.fixture(scope="module", params=NAMES)
def made(request) -> Organism:
    return organism(request.param)


@pytest.fixture(scope="module")
def panel(made):
    return make(made.env).panel("valid_unseen")


@pytest.fixture(scope="module")
def folder(made):
    return data_dir() / "policies" / f"{made.env}-tiny"


@pytest.fixture(scope="module")
def recorded(made, panel, folder) -> dict[str, np.ndarray]:
    """Success by task of `valid_unseen`, an arm each, T = 0.4."""
    lines = map(json.loads, (folder / "measured.jsonl").read_text(encoding="utf-8").splitlines())
    found = {line["name"]: np.array([int(c) for c in line["successes"]]) for line in lines}
    assert list(found)[: len(ARMS) + 1] == [*ARMS, TAUGHT] and list(arms(made, panel)) == ARMS
    assert all(set(row) == {0, 1} and len(row) == len(panel) >= 200 for row in found.values())
    return found


@pytest.fixture(scope="module")
def found(made, folder):
    """Some tasks an arm; analyzer and play before Stage 1, and as committed after it."""
    return examine(made, load_policy(folder), [load_policy(f"{made.env}-tiny-stage1")], count=PLAYED)


@pytest.mark.parametrize("name", [*ARMS, TAUGHT])
def test_games_go_as_recorded(name, found, recorded, panel):
    """Two of 48 may go otherwise in another machine's arithmetic."""
    result = found["arms"].get(name) or found["after stage 1"][0]
    assert result.name == name and result.protocol["temperature"] == 0.4
    chosen = spread(panel, PLAYED)
    before = recorded[name][[n for n, task in enumerate(panel) if task in chosen]]
    assert np.abs(np.array(result.successes[0]) - before).sum() <= 2


def test_it_is_mediocre_without_a_skill(recorded):
    assert 0.30 <= recorded["unprompted"].mean() <= 0.50


def test_the_right_skill_helps_by_25_points(recorded):
    assert recorded["right skill"].mean() >= recorded["unprompted"].mean() + 0.25


@pytest.mark.parametrize("placebo", ["another kind's skill", "text without advice"])
def test_a_placebo_does_not_help(recorded, placebo):
    assert recorded[placebo].mean() <= recorded["unprompted"].mean() + 0.03


def test_a_wrong_skill_is_followed(recorded):
    assert recorded["wrong skill"].mean() <= recorded["unprompted"].mean() - 0.10


def test_stage1_does_not_cost_play(recorded):
    assert recorded[TAUGHT].mean() >= recorded["unprompted"].mean() - 0.05


def test_after_stage1_the_analyzer_names_the_right_workflow(made, found):
    before, (after,) = found["analyzer"]["before"], found["analyzer"]["after"]
    assert set(after) == set(made.kinds)
    assert min(after.values()) >= 0.85, after
    assert sum(before.values()) / len(before) < 0.5  # otherwise Stage 1 would have nothing to teach


@pytest.mark.slow
def test_all_games_go_as_recorded(made, folder, recorded):
    """Two points for another machine's arithmetic."""
    found = examine(made, load_policy(folder), [load_policy(f"{made.env}-tiny-stage1")])
    assert min(found["analyzer"]["after"][0].values()) >= 0.85
    for result in [*found["arms"].values(), *found["after stage 1"]]:
        assert abs(np.mean(result.successes[0]) - recorded[result.name].mean()) <= 0.02, result.name


@pytest.mark.slow
def test_stage1_makes_such_a_policy_again(made, folder, panel):
    """The cards have two runs, LOG.md more seeds on fresh games."""
    (again,) = teach_repeatedly(made, load_policy(folder), 1)
    committed = load_policy(f"{made.env}-tiny-stage1")
    probe = collect(committed, make(made.env), panel, seed=1)
    assert min(analyzer_accuracy(make(made.env), again, probe).values()) >= 0.85
    print("to the last bit:", again.version == committed.version)


def test_the_card_is_true(folder, recorded):
    card = (folder / "README.md").read_text(encoding="utf-8")
    policy = load_policy(folder)
    assert f"`{policy.version}`" in card
    size = sum(p.numel() for p in policy.model.parameters())
    assert f"{size:,} parameters" in card and 1e6 <= size <= 3e6
    for name in ARMS:
        (figure,) = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+) \[", card, re.MULTILINE)
        assert abs(float(figure) - 100 * recorded[name].mean()) <= 0.05, name


def test_it_is_small_and_safe(folder):
    assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20
    assert not [p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pkl", ".pth")]
