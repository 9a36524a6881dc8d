"""Panels, results, and tables that refuse to mix what was not measured alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seedkit.analyzer import SkillLibrary
from seedkit.envs import make, panel_hash, spread
from seedkit.evaluate import ProtocolError, Result, compare, evaluate, table
from seedkit.policy import load_policy


def result(name: str, successes, **protocol) -> Result:
    base = {"panel": "abc", "tasks": len(successes[0]), "temperature": 0.4, "prompted": None}
    kinds = tuple("pick" if n % 2 else "clean" for n in range(len(successes[0])))
    return Result(name, tuple(map(tuple, successes)), kinds, base | protocol, 9.0, 40.0)


def test_rows_are_paired_with_the_baseline():
    base = result("base", [[0.0, 1.0, 0.0, 1.0]] * 2)
    better = result("better", [[1.0, 1.0, 0.0, 1.0]] * 2)
    rows = compare([base, better], baseline="base")
    assert rows[0].difference is None and rows[0].success.mean == 0.5
    # differences by task: 1, 0, 0, 0
    assert rows[1].difference is not None and rows[1].difference.mean == pytest.approx(0.25)
    assert rows[1].by_kind == {"clean": 0.5, "pick": 1.0}
    text = table(rows)
    assert "better" in text and "75.0 [" in text and "+25.0 [" in text


@pytest.mark.parametrize("change", [{"panel": "other"}, {"temperature": 1.0}, {"max_steps": 30}])
def test_other_protocols_are_refused_and_the_field_is_named(change):
    rows = [result("base", [[0.0, 1.0]]), result("other", [[1.0, 1.0]], **change)]
    with pytest.raises(ProtocolError, match=next(iter(change))):
        compare(rows, baseline="base")


def test_a_prompted_result_may_stand_beside_an_unprompted_one():
    rows = [result("base", [[0.0, 1.0]]), result("prompted", [[1.0, 1.0]], prompted="digest")]
    assert len(compare(rows, baseline="base")) == 2


def test_names_are_checked():
    with pytest.raises(ValueError, match="no result named 'x'"):
        compare([result("base", [[1.0]])], baseline="x")
    with pytest.raises(ValueError, match="same name"):
        compare([result("base", [[1.0]]), result("base", [[1.0]])], baseline="base")


def test_evaluation_records_what_decides_it():
    env, policy = make("household"), load_policy("household-tiny")
    tasks = spread(env.panel("valid_seen"), 6)
    found = evaluate(policy, env, tasks, episodes=2, seed=5, max_steps=10)
    again = evaluate(policy, env, tasks, episodes=2, seed=5, max_steps=10)
    assert found == again and len(found.successes) == 2 and len(found.successes[0]) == 6
    assert found.protocol["panel"] == panel_hash(tasks) == panel_hash(tasks[::-1])
    assert found.protocol["grammar"] == ["move"] and found.protocol["prompted"] is None
    cut = evaluate(policy, env, tasks, seed=5, max_steps=10, max_new_tokens=1)
    assert cut.response_tokens == cut.steps == 10 and not any(map(any, cut.successes))
    prompted = evaluate(policy, env, tasks, skills=SkillLibrary().write_for(tasks), max_steps=10)
    assert prompted.protocol["prompted"] is not None
    with pytest.raises(ValueError, match="no tasks"):
        evaluate(policy, env, [])


def test_part_of_a_panel_keeps_its_mix():
    tasks = make("household").panel("valid_unseen")
    part = spread(tasks, 12)
    assert sorted(t.kind for t in part) == sorted(2 * ["clean", "cool", "heat", "look", "pick", "two"])
    assert part == spread(tasks[::-1], 12)
    assert spread(tasks, 10**6) != [] and len(spread(tasks, 10**6)) == len(tasks)
    assert replace(part[0]) == part[0]
