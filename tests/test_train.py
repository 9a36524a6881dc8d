"""Stage 1, Stage 2, and a run directory that survives anything."""

from __future__ import annotations

import inspect
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from seedkit.analyzer import PlaceboAnalyzer, PolicyAnalyzer, RuleAnalyzer, SkillLibrary
from seedkit.envs import make, spread
from seedkit.io import DataError, read_ledger, read_records
from seedkit.methods import METHODS, Method, method_losses
from seedkit.policy import Policy, load_policy
from seedkit.rescoring import combine, contrast, critical, rescore
from seedkit.rollout import collect
from seedkit.train import (
    LEFT_OUT,
    RunError,
    Stage1Config,
    Stage2Config,
    _step,
    alarms,
    batch_tasks,
    check,
    imitate,
    read_run,
    rewards_of,
    rollout_metrics,
    stage1,
    stage2,
)
from seedkit.types import Skill

SMALL = Stage2Config(updates=2, tasks=2, group=4, max_steps=8)


@pytest.fixture(scope="module")
def env():
    return make("household")


@pytest.fixture(scope="module")
def tasks(env):
    return spread(env.panel("train"), 6)


def tiny():
    return load_policy("household-tiny")


def same_weights(a, b) -> bool:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def plain(rows):
    """Metrics without wall-clock times."""
    return [{k: v for k, v in row.items() if not k.startswith("seconds_")} for row in rows]


# --- stage 1


def test_stage1_teaches_the_analysis_and_leaves_out_trajectories_without_a_skill(env, tasks):
    policy = tiny()
    played = collect(policy, env, tasks, group=2, seed=3)
    skills = RuleAnalyzer().write_skills(played)
    rows = stage1(policy, played, skills, Stage1Config(epochs=6, batch_size=4))
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    # nothing of a trajectory without a skill is learnt: with one usable skill there is one step an epoch
    some = [skills[0], *[Skill(reason="no match")] * (len(skills) - 1)]
    assert len(stage1(tiny(), played, some, Stage1Config(epochs=2, batch_size=4))) == 2
    with pytest.raises(RunError, match="no trajectory has a skill"):
        stage1(policy, played, [Skill(reason="null")] * len(played))
    with pytest.raises(RunError, match="one skill a trajectory"):
        stage1(policy, played, skills[1:])


def test_the_anchor_holds_play_where_it_was(env, tasks, monkeypatch):
    """Episodes of three sorts; drift is by hand the mean of d²/2, d = log-prob now less log-prob at the start."""
    advised = collect(tiny(), env, tasks[:2], seed=4, max_steps=8, skills=SkillLibrary().write_for(tasks[:2]))
    cold = collect(tiny(), env, tasks[2:4], seed=4, max_steps=8, temperature=0.4)
    played = [*advised, *cold, *collect(tiny(), env, tasks[4:], seed=4, max_steps=8)]
    assert all(t.skill for t in advised)
    skills = RuleAnalyzer().write_skills(played)
    moves = [tiny().lay_out(t, Skill() if t.skill else None) for t in played]
    start = torch.cat(tiny().token_logprobs(moves))

    def teach(anchor):
        policy, drifts, weights = tiny(), [], []  # by hand, after each step

        def step(policy, optimizer):
            _step(policy, optimizer)
            drifts.append(float((torch.cat(policy.token_logprobs(moves)) - start).square().mean() / 2))
            weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))

        monkeypatch.setattr("seedkit.train._step", step)
        return stage1(policy, played, skills, Stage1Config(epochs=6, batch_size=6, anchor=anchor)), drifts, weights

    free, away, first = teach(0.0)
    held, near, first_held = teach(3.0)
    for rows, drifts in ((free, away), (held, near)):
        # nothing has moved before the first step: for a policy's own plain episodes and for all others
        assert [r["drift"] for r in rows] == pytest.approx([0.0, *drifts[:-1]], rel=1e-3, abs=1e-9)
    assert near[-1] < 0.5 * away[-1]
    assert held[-1]["loss"] < 0.5 * held[0]["loss"]  # it still learns to write
    # the gradient of d²/2 is d times that of the policy's log-prob: none where nothing has moved yet
    begin = torch.cat([p.detach().flatten() for p in tiny().model.parameters()])
    assert torch.cosine_similarity(first[0] - begin, first_held[0] - begin, dim=0) > 0.999


def test_imitation_says_what_was_said(env, tasks):
    advised = collect(tiny(), env, tasks[:2], max_steps=6, skills=SkillLibrary().write_for(tasks[:2]))
    policy = tiny()
    samples = [sample for t in advised for sample in policy.samples(t)]
    before = torch.cat(policy.token_logprobs(samples)).mean()
    rows = imitate(policy, advised, Stage1Config(epochs=4, batch_size=1))
    after = torch.cat(policy.token_logprobs(samples)).mean()
    assert len(rows) == 8 and after > before + 0.05 and {r["drift"] for r in rows} == {0.0}
    assert rows[0]["loss"] > rows[-1]["loss"] > 0
    assert all(t.skill for t in advised) and samples[0].ids == policy.samples(advised[0])[0].ids  # the skill is in it
    silent = replace(advised[0], turns=())
    assert len(imitate(tiny(), [silent, advised[0]], Stage1Config(epochs=1))) == 1
    with pytest.raises(RunError, match="no trajectory has a response to learn from"):
        imitate(policy, [silent])


# --- stage 2


def test_two_runs_agree_bit_for_bit(env, tasks):
    config = replace(SMALL, updates=5, tasks=1)
    first, second = tiny(), tiny()
    a = stage2(first, env, tasks, config)
    b = stage2(second, make("household"), tasks, config)
    assert plain(a) == plain(b)
    assert same_weights(first, second)
    assert not same_weights(first, tiny())
    other = stage2(tiny(), env, tasks, replace(config, seed=1))
    assert plain(other) != plain(a)


class StepWriter:
    """The library's skill, and a step skill for every second turn."""

    author = "step writer"

    def write_skills(self, trajectories):
        skills = SkillLibrary().write_skills(trajectories)
        steps = [{n: "open what is closed." for n in range(1, len(t.turns), 2)} for t in trajectories]
        return [replace(skill, steps=s) for skill, s in zip(skills, steps, strict=True)]


@pytest.fixture(scope="module")
def by_grpo(env, tasks):
    policy = tiny()
    stage2(policy, env, tasks, replace(SMALL, method="grpo"))
    return policy


@pytest.mark.parametrize("name", ["seed", "rlsd", "opid", "sdar", "reverse_kl_full", "several"])
def test_without_its_weight_a_method_is_grpo_bit_for_bit(env, tasks, by_grpo, name):
    """λ = 0; RLSD's μ = 0; OPID's w = 0 for episode and step skills."""
    policy = tiny()
    analyzer = StepWriter() if name == "opid" else None
    rows = stage2(policy, env, tasks, replace(SMALL, method=name, coef=0.0), analyzer=analyzer)
    assert same_weights(by_grpo, policy) and rows[0]["abs_shift"] > 0
    assert not same_weights(by_grpo, tiny())


@pytest.mark.parametrize("name", ["seed", "rlsd", "opid", "reverse_kl_full"])
def test_with_its_weight_a_method_is_not_grpo(env, tasks, by_grpo, name):
    policy = tiny()
    stage2(policy, env, tasks, replace(SMALL, method=name, coef=0.3))
    assert not same_weights(by_grpo, policy)


def test_a_flat_gate_is_half_of_ungated_distillation_bit_for_bit(env, tasks):
    flat, plain_half = tiny(), tiny()
    stage2(flat, env, tasks, replace(SMALL, method="sdar", beta=0.0, coef=0.2))
    stage2(plain_half, env, tasks, replace(SMALL, method="grpo_opsd", coef=0.1))
    assert same_weights(flat, plain_half)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_table_trains(env, tasks, name):
    policy = tiny()
    (row,) = stage2(policy, env, tasks, replace(SMALL, method=name, updates=1))
    numbers = [v for v in row.values() if isinstance(v, (int, float))]
    assert all(math.isfinite(v) for v in numbers)
    if METHODS[name].term:
        assert row["supervised"] > 0 and row["loss_distill"] != 0 and not same_weights(policy, tiny())


def test_whole_distributions_are_those_of_both_contexts_at_one_temperature(env, tasks, monkeypatch):
    start, heats, seen, next_logp = tiny(), set(), [], Policy.next_logp

    def spy(self, *padded, temperature):
        heats.add(temperature)
        return next_logp(self, *padded, temperature=temperature)

    monkeypatch.setattr(Policy, "next_logp", spy)
    config = replace(SMALL, method="reverse_kl_full", updates=1, coef=1.0, temperature=0.8, kl_coef=0.0)
    (row,) = stage2(tiny(), env, tasks, config, analyzer=SkillLibrary(), on_update=lambda *a: seen.append(a))
    assert heats == {0.8}
    trajectories = seen[0][1]
    found = contrast(start, trajectories, SkillLibrary().write_skills(trajectories))
    exact = sum(float(one.kl.sum()) for one in found if one is not None)
    assert row["loss_distill"] == pytest.approx(exact / (8 * row["tokens"]), rel=1e-4) and exact > 0


def test_opid_tells_step_skills_from_episode_skills(env, tasks, monkeypatch):
    calls = []
    monkeypatch.setattr("seedkit.train.method_losses", lambda *a, **k: (calls.append(k), method_losses(*a, **k))[1])
    seen = []
    config = replace(SMALL, method="opid", updates=1)
    stage2(tiny(), env, tasks, config, analyzer=StepWriter(), on_update=lambda *a: seen.append(a))
    trajectories, shifts = seen[0][1:]
    skills = StepWriter().write_skills(trajectories)
    marked = sum(int(k["step_mask"].sum()) for k in calls)
    assert marked == sum(sum(critical(t, s)) for t, s in zip(trajectories, skills, strict=True)) > 0
    behaviour = [t.behaviour_logp for t in trajectories]
    assert shifts == rescore(tiny(), trajectories, skills, student_logp=behaviour, critical_first=True)


def test_several_teachers_train_and_one_skill_is_all_some_methods_take(env, tasks):
    seen = []
    config = replace(SMALL, method="several", updates=1)
    stage2(tiny(), env, tasks, config, on_update=lambda *a: seen.append(a))
    _, trajectories, shifts = seen[0]
    writers = PolicyAnalyzer(start := tiny()), SkillLibrary()
    behaviour = [t.behaviour_logp for t in trajectories]
    parts = [rescore(start, trajectories, w.write_skills(trajectories), student_logp=behaviour) for w in writers]
    assert shifts == combine(parts, "agreement") != combine(parts, "mean")
    two = [SkillLibrary(), RuleAnalyzer()]
    for name in ("reverse_kl_full", "opid"):
        with pytest.raises(RunError, match=f"{name} takes one skill a trajectory, not 2"):
            stage2(tiny(), env, tasks, replace(SMALL, method=name), analyzer=two)
    with pytest.raises(RunError, match="mine has a teacher but says not where its skills come from"):
        stage2(tiny(), env, tasks, SMALL, method=Method("mine", "?", "?", term="plain", coef=1.0))


def test_failed_trajectories_only(env, tasks):
    seen = []
    config = Stage2Config(updates=1, tasks=6, group=4)
    method = replace(METHODS["seed"], failed_only=True)
    (row,) = stage2(
        tiny(), env, tasks, config, method=method, analyzer=SkillLibrary(), on_update=lambda *a: seen.append(a)
    )
    _, trajectories, shifts = seen[0]
    assert 0 < sum(t.success for t in trajectories) < 24
    assert [any(s.mask) for s in shifts] == [not t.success for t in trajectories]
    assert row["skills"] == {
        "ok": sum(not t.success for t in trajectories),
        LEFT_OUT: sum(t.success for t in trajectories),
    }


def test_a_term_that_fades_out(env, tasks):
    asked = []

    class Counted(SkillLibrary):
        def write_skills(self, trajectories):
            asked.append(len(trajectories))
            return super().write_skills(trajectories)

    method = replace(METHODS["seed"], coef=0.4, fade=2)
    rows = stage2(tiny(), env, tasks, replace(SMALL, updates=3), method=method, analyzer=Counted())
    half = replace(METHODS["seed"], coef=0.2)
    (first,) = stage2(tiny(), env, tasks, replace(SMALL, updates=1), method=half, analyzer=SkillLibrary())
    assert rows[0]["loss_distill"] == first["loss_distill"] != 0 and rows[0]["grad_norm"] == first["grad_norm"]
    assert len(asked) == 1  # nobody writes, and nobody scores, what would weigh nothing
    assert [("abs_shift" in row, row["loss_distill"] != 0) for row in rows] == [(True, True), *[(False, False)] * 2]


def test_a_placebo_trains_and_names_no_workflow(env, tasks):
    placebo = PlaceboAnalyzer(SkillLibrary(), "irrelevant")  # the library itself names the right one every time
    (row,) = stage2(tiny(), env, tasks, replace(SMALL, updates=1), analyzer=placebo)
    assert row["skill_accuracy"] == 0.0 and row["supervised"] == 1.0 and row["abs_shift"] > 0


# --- the teacher: live, EMA, frozen


@pytest.mark.parametrize("decay", [0.0, 0.75, 1.0])
def test_who_teaches(env, tasks, tmp_path, decay):
    policy, seen, taught_by = tiny(), [tiny()], []

    def look(row, trajectories, shifts):
        seen.append(policy.clone())
        taught_by.append({s.policy_version for s in shifts})

    method = replace(METHODS["seed"], teacher_decay=decay, coef=0.3)
    stage2(policy, env, tasks, SMALL, method=method, run=tmp_path, on_update=look)
    start, first, second = (p.model.state_dict() for p in seen)
    assert taught_by[0] == {seen[0].version}
    kept = tmp_path / "checkpoints" / "last" / "teacher"
    if decay in (0.0, 1.0):  # the live policy, the one we started with: neither needs a copy
        assert taught_by[1] == {seen[0 if decay else 1].version} and not kept.exists()
        return
    assert not taught_by[1] & {p.version for p in seen}
    for name, weights in load_policy(kept).model.state_dict().items():
        expected = 0.75 * (0.75 * start[name] + 0.25 * first[name]) + 0.25 * second[name]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert name.endswith("norm.weight") or not torch.equal(weights, start[name])


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_a_resumed_teacher_is_the_one_that_was_there(env, tasks, tmp_path, decay):
    class Stop(Exception):
        pass

    def stop(row, trajectories, shifts):
        if row["update"] == 1:
            raise Stop

    method = replace(METHODS["seed"], teacher_decay=decay, coef=0.3)
    config = replace(SMALL, updates=3, max_steps=6, lr=1e-3)
    known: dict[str, Any] = {"env": env, "tasks": tasks, "config": config, "method": method}
    whole, broken = tiny(), tiny()
    rows = stage2(whole, **known, run=tmp_path / "whole")
    with pytest.raises(Stop):
        stage2(broken, **known, run=tmp_path / "broken", on_update=stop)
    again = tiny()
    assert plain(stage2(again, **known, run=tmp_path / "broken", resume=True)) == plain(rows)
    assert same_weights(whole, again)
    if decay < 1:
        one, other = (
            load_policy(tmp_path / name / "checkpoints" / "last" / "teacher") for name in ("whole", "broken")
        )
        assert same_weights(one, other) and not same_weights(one, whole)
    known["method"] = METHODS["seed"]  # with another teacher it is another run
    with pytest.raises(RunError, match="method"):
        stage2(tiny(), **known, run=tmp_path / "whole", resume=True)


@pytest.mark.parametrize("name", ["sdar", "reverse_kl_full"])
def test_the_update_does_not_depend_on_micro_batches(env, tasks, monkeypatch, name):
    config = replace(SMALL, method=name, updates=1, coef=0.3)
    whole = tiny()
    stage2(whole, env, tasks, config)
    batches = Policy.batches
    monkeypatch.setattr(Policy, "batches", lambda self, samples, *_, **__: batches(self, samples, 1))
    single = tiny()
    stage2(single, env, tasks, config)
    # Adam's first step is lr · sign(gradient) where the gradient is not tiny: compare the step, not the last digit
    start = tiny().model.state_dict()
    moved = torch.cat([(whole.model.state_dict()[k] - v).flatten() for k, v in start.items()])
    also = torch.cat([(single.model.state_dict()[k] - v).flatten() for k, v in start.items()])
    assert torch.cosine_similarity(moved, also, dim=0) > 0.999


def test_metrics_say_what_happened(env, tasks):
    seen = []
    rows = stage2(tiny(), env, tasks, SMALL, validation=tasks[:3], eval_every=2, on_update=lambda *a: seen.append(a))
    assert [r["update"] for r in rows] == [1, 2]
    row, trajectories, shifts = seen[0]
    assert len(trajectories) == len(shifts) == 8
    assert row["success"] == sum(t.success for t in trajectories) / 8
    tokens = sum(len(t.response_ids) for t in trajectories)
    assert row["tokens"] == tokens / 8
    assert row["supervised"] == sum(s.skill_tokens > 0 for s in shifts) / 8
    gaps = [abs(d) for s in shifts for d, m in zip(s.delta, s.mask, strict=True) if m]
    assert row["abs_shift"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert row["behaviour_gap"] < 1e-4  # what is trained on is what was sampled
    assert row["kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is where we start
    assert {"seconds_rollout", "seconds_analysis", "seconds_rescoring", "seconds_update"} <= set(row)
    assert "validation_success" in rows[1] and "validation_success" not in rows[0]
    assert sum(row["skills"].values()) == 8


def test_policy_versions_of_trajectories_skills_and_shifts_match(env, tasks):
    """Claim 3: on-policy means that one checkpoint acts, analyzes and teaches."""
    policy, seen = tiny(), []
    versions = [policy.version]

    def look(row, trajectories, shifts):
        seen.append(({t.policy_version for t in trajectories}, {s.policy_version for s in shifts}))
        versions.append(policy.version)

    stage2(policy, env, tasks, SMALL, on_update=look)
    for n, (acted, taught) in enumerate(seen):
        assert acted == taught == {versions[n]}
    assert versions[0] != versions[1] != versions[2]


def test_a_method_and_an_analyzer_of_ones_own(env, tasks):
    mine = replace(
        METHODS["seed"], name="mine", term=lambda s, k, mask, *, beta, behaviour_logp: 0.5 * (k - s), coef=0.1
    )
    rows = stage2(tiny(), env, tasks, replace(SMALL, updates=1), method=mine, analyzer=SkillLibrary())
    assert rows[0]["skill_accuracy"] == 1.0 and rows[0]["skills"] == {"ok": 8}
    assert rows[0]["loss_distill"] != 0.0


def own_method(env, tasks):
    def trust(student_logp, teacher_logp, response_mask, *, beta, behaviour_logp):
        """Follow the teacher, but no token by more than a nat."""
        return (teacher_logp - student_logp).clamp(-1, 1).detach() * -student_logp

    mine = Method(
        "trust",
        "A + λ·clip(Δ, -1, 1)",
        "The sampled reverse KL, cut",
        skills="self",
        term=trust,
        coef=0.1,
    )
    return stage2(tiny(), env, tasks, replace(SMALL, updates=1), method=mine)


def test_a_readers_own_method_takes_fifteen_lines(env, tasks):
    assert len(inspect.getsource(own_method).splitlines()) <= 15 + 1  # and the line that names the function
    (row,) = own_method(env, tasks)
    assert row["loss_distill"] != 0.0 and row["supervised"] > 0


def test_skill_grpo_puts_the_skill_into_the_students_prompt(env, tasks):
    seen = []
    stage2(tiny(), env, tasks, replace(SMALL, method="skill_grpo", updates=1), on_update=lambda *a: seen.append(a))
    assert all(t.skill is not None and t.skill.author == "library" for t in seen[0][1])


def test_tasks_come_around_only_when_all_were_used(tasks):
    config = replace(SMALL, tasks=4)
    stream = [t.id for update in range(3) for t in batch_tasks(tasks, config, update)]
    assert len(stream) == 12 and set(stream[:6]) == set(stream[6:]) == {t.id for t in tasks}
    assert batch_tasks(tasks, replace(config, method="grpo"), 1) == batch_tasks(tasks, config, 1)  # paired


def test_invalid_actions_cost(env, tasks):
    played = collect(tiny(), env, tasks[:1], max_steps=3, seed=1)[0]
    broken = replace(played, reward=1.0, turns=tuple(replace(t, valid=n > 0) for n, t in enumerate(played.turns)))
    assert rewards_of([broken], 0.01).tolist() == pytest.approx([0.99])


def test_groups_that_the_penalty_alone_tells_apart_are_counted(env, tasks):
    """Four pairs: both fail, one more validly; both fail alike; one wins; both win, one more validly."""
    (one,) = collect(tiny(), env, tasks[:1], max_steps=2)
    fair, foul = ([replace(turn, valid=valid) for turn in one.turns] for valid in (True, False))
    lost, lost_foul, won, won_foul = (
        replace(one, turns=tuple(turns), reward=reward) for reward in (0.0, 1.0) for turns in (fair, foul)
    )
    episodes = [lost, lost_foul, lost, lost, won, lost_foul, won, won_foul]
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    row = rollout_metrics(episodes, rewards_of(episodes, 0.01), groups)
    assert (row["degenerate_groups"], row["penalty_groups"]) == (1, 2)
    row = rollout_metrics(episodes, rewards_of(episodes, 0.0), groups)
    assert (row["degenerate_groups"], row["penalty_groups"]) == (3, 0)


def test_alarms_name_each_sign_of_collapse():
    fine = {"entropy": 1.0, "kl": 0.0, "grad_norm": 1.0, "behaviour_gap": 0.0, "supervised": 1.0, "abs_shift": 0.1}
    fine |= {"skills": {"ok": 8}, "success": 0.5}
    assert alarms(fine, []) == []
    for change, word in (
        ({"entropy": 0.1}, "entropy"),
        ({"kl": 2.0}, "KL"),
        ({"grad_norm": math.nan}, "not finite"),
        ({"grad_norm": 50.0}, "gradient norm"),
        ({"supervised": 0.25}, "25%"),
        ({"abs_shift": 0.0}, "move nothing"),
        ({"behaviour_gap": 0.01}, "differ from the rollout"),
    ):
        found = alarms(fine | change, [fine])
        assert len(found) == 1 and word in found[0]
    assert alarms(fine | {"supervised": 0.25, "skills": {"ok": 2, LEFT_OUT: 6}}, [fine]) == []  # as was asked for
    lost = fine | {"success": 0.0}
    assert alarms(lost, [fine] * 10) == alarms(lost, [fine] * 10 + [lost] * 3) == []  # 45 and 30 %: noise so far
    assert alarms(lost | {"penalty_groups": 3}, [fine] * 10 + [lost] * 4) == [
        "success fell to 25% of the last ten updates' episodes from 50%",
        "no success in five updates; the penalty for invalid actions alone tells 3 groups apart",
    ]
    assert len(alarms(lost, [lost] * 4)) == 1 and alarms(lost, [lost] * 3) == alarms(fine, [lost] * 4) == []


@pytest.mark.parametrize(
    ("stage", "field", "value"),
    [
        (Stage2Config, "updates", 0),
        (Stage2Config, "updates", 2.5),
        (Stage2Config, "tasks", True),
        (Stage2Config, "group", -1),
        (Stage2Config, "lr", 0.0),
        (Stage2Config, "lr", math.nan),
        (Stage2Config, "lr", "1e-4"),
        (Stage2Config, "temperature", 0.0),
        (Stage2Config, "kl_coef", -0.1),
        (Stage2Config, "coef", math.inf),
        (Stage2Config, "seed", None),
        (Stage2Config, "method", "sed"),
        (Stage1Config, "epochs", 0),
        (Stage1Config, "lr", -1.0),
        (Stage1Config, "batch_size", 0),
        (Stage1Config, "anchor", -1.0),
    ],
)
def test_a_wrong_setting_is_named(stage, field, value):
    config = stage()
    object.__setattr__(config, field, value)  # past the type checks that only tests have
    with pytest.raises(ValueError, match=field) as error:
        check(config)
    assert "\n" not in str(error.value)


# --- run directory


def test_a_run_directory_holds_everything_and_is_not_overwritten(env, tasks, tmp_path):

    run = tmp_path / "run"
    policy = tiny()
    rows = stage2(policy, env, tasks, SMALL, run=run, validation=tasks[:2], eval_every=1, save_every=1)
    protocol, metrics = read_run(run)
    assert metrics == json.loads(json.dumps(rows))
    assert protocol["config"]["method"] == "seed" and protocol["config"]["beta"] == 5.0
    assert protocol["method"]["term"] == "gated" and protocol["method"]["teacher_decay"] == 0.0
    assert protocol["analyzers"] == ["policy"]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"first", "last", "best", "0001", "0002"}
    assert same_weights(load_policy(run / "checkpoints" / "last"), policy)
    assert same_weights(load_policy(run / "checkpoints" / "first"), tiny())
    records = read_records(run / "trajectories" / "0002.parquet")
    assert len(records) == 8 and all(r.skill is not None and r.shifts is not None for r in records)
    for update, row in zip(("0001", "0002"), metrics, strict=True):  # the books: shares add up to what was logged
        ledger = read_ledger(run / "trajectories" / f"{update}.json")
        assert len(ledger.advantage) == len(ledger.loss) == 8 and ledger.method == "seed"
        assert ledger.tokens == pytest.approx(8 * row["tokens"])
        assert sum(ledger.loss) == pytest.approx(row["loss_policy"] + row["loss_distill"], abs=1e-7)
    assert not list(run.rglob("*.bin")) and not list(run.rglob("*.pt"))
    with pytest.raises(RunError, match="resume it"):
        stage2(tiny(), env, tasks, SMALL, run=run)
    with pytest.raises(RunError, match="config"):
        stage2(tiny(), env, tasks, replace(SMALL, lr=1e-3), run=run, resume=True)
    again = stage2(tiny(), env, tasks, SMALL, run=run, resume=True, validation=tasks[:2], eval_every=1, save_every=1)
    assert again == metrics  # a finished run is not run again


@pytest.fixture(scope="module")
def finished(env, tasks, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    stage2(tiny(), env, tasks, replace(SMALL, updates=1), run=run)
    return run


def edit_optimizer(run, change):
    path = run / "checkpoints" / "last" / "optimizer.safetensors"
    save_file(change(load_file(path)), path)


def edit_rows(run, text):
    (run / "checkpoints" / "last" / "rows.json").write_text(text)


FAULTS = {
    "protocol is torn": (lambda run: (run / "protocol.json").write_text("{"), "protocol.json: should be one JSON"),
    "protocol is a list": (lambda run: (run / "protocol.json").write_text("[]"), "protocol.json: should be one JSON"),
    "protocol is not UTF-8": (lambda run: (run / "protocol.json").write_bytes(b"\xff{}"), "protocol.json: should be"),
    "protocol is empty": (lambda run: (run / "protocol.json").write_text("{}"), "started differently"),
    "no optimizer": (lambda run: (run / "checkpoints/last/optimizer.safetensors").unlink(), "cannot be resumed from"),
    "optimizer is noise": (
        lambda run: (run / "checkpoints/last/optimizer.safetensors").write_bytes(b"not tensors"),
        "cannot be resumed from",
    ),
    "optimizer of another shape": (
        lambda run: edit_optimizer(run, lambda w: {**w, "0.exp_avg": torch.zeros(3)}),
        "0.exp_avg fits no parameter",
    ),
    "optimizer of a larger policy": (
        lambda run: edit_optimizer(run, lambda w: {**w, "999.exp_avg": torch.zeros(3)}),
        "999.exp_avg fits no parameter",
    ),
    "optimizer lacks a parameter": (
        lambda run: edit_optimizer(run, lambda w: {k: v for k, v in w.items() if not k.startswith("0.")}),
        r"knows \d+ of \d+ parameters",
    ),
    "optimizer has strange names": (
        lambda run: edit_optimizer(run, lambda w: {f"adam.{k}": v for k, v in w.items()}),
        "cannot be resumed from",
    ),
    "no rows": (lambda run: (run / "checkpoints/last/rows.json").unlink(), "cannot be resumed from"),
    "rows are torn": (lambda run: edit_rows(run, '[{"update": 1'), "cannot be resumed from"),
    "rows are an object": (lambda run: edit_rows(run, '{"update": 1}'), "a row an update"),
    "rows are a number": (lambda run: edit_rows(run, "3"), "cannot be resumed from"),
    "rows are null": (lambda run: edit_rows(run, "null"), "a row an update"),
    "there is no row": (lambda run: edit_rows(run, "[]"), "a row an update"),
    "a row is missing": (lambda run: edit_rows(run, '[{"update": 2}]'), "a row an update"),
    "weights are cut off": (
        lambda run: os.truncate(run / "checkpoints/last/model.safetensors", 5000),
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_run_is_one_line(fault, finished, env, tasks, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    breaks, message = FAULTS[fault]
    breaks(run)
    with pytest.raises(ValueError, match=message) as error:
        stage2(tiny(), env, tasks, replace(SMALL, updates=1), run=run, resume=True)
    assert str(run) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"\xff"])
def test_a_protocol_that_cannot_be_read_names_its_file(content, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "protocol.json").write_bytes(content)
    with pytest.raises(DataError, match="protocol.json: should be one JSON object"):
        read_run(tmp_path / "run")
    with pytest.raises(RunError, match="not a run directory"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["eval_every", "save_every"])
def test_never_is_no_interval(name, env, tasks):
    with pytest.raises(RunError, match=f"{name} must be at least 1, got 0"):
        stage2(tiny(), env, tasks, SMALL, **{name: 0})  # type: ignore[arg-type]  # any name


def play_on(run):
    """A run of seven updates, from wherever it was left."""
    env = make("household")
    tasks = spread(env.panel("train"), 6)
    config = Stage2Config(updates=7, tasks=2, group=3, max_steps=8, coef=0.1)
    more: dict[str, Any] = {"validation": tasks[:2], "eval_every": 3, "save_every": 3}
    stage2(tiny(), env, tasks, config, run=run, resume=True, **more)


def test_killed_at_three_random_points_a_run_resumes_to_the_same_numbers(tmp_path, monkeypatch):
    """Four processes play `killed` one after the other, this one plays `whole`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    jobs = multiprocessing.get_context("forkserver")  # a process that imports what is slow once, for all four
    jobs.set_forkserver_preload(["pytest", "seedkit.train", "transformers.models.llama.modeling_llama"])
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    rng, done = random.Random(), 0
    for _ in range(3):
        job = jobs.Process(target=play_on, args=(killed,))
        job.start()
        goal, begin = done + rng.randint(1, 2), time.monotonic()
        while done < goal and job.is_alive() and time.monotonic() - begin < 120:
            time.sleep(0.02)
            if (killed / "metrics.jsonl").exists():
                done = (killed / "metrics.jsonl").read_bytes().count(b"\n")
        time.sleep(rng.random() * 0.5)
        job.kill()
        job.join()
        assert job.exitcode == -signal.SIGKILL, "it finished before it could be killed"
    job = jobs.Process(target=play_on, args=(killed,))
    job.start()
    job.join()
    assert job.exitcode == 0
    try:
        torch.set_num_threads(1)
        play_on(whole)
    finally:
        torch.set_num_threads(threads)
    assert plain(read_run(killed)[1]) == plain(read_run(whole)[1])
    a, b = (load_policy(run / "checkpoints" / "last") for run in (killed, whole))
    assert same_weights(a, b)
    assert {p.name for p in (killed / "checkpoints").iterdir()} == {p.name for p in (whole / "checkpoints").iterdir()}
