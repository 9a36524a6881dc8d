"""Stage 1, Stage 2, and a run directory that survives anything."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from seedkit.analyzer import RuleAnalyzer, SkillLibrary
from seedkit.envs import make, spread
from seedkit.io import read_ledger, read_records
from seedkit.methods import METHODS
from seedkit.policy import load_policy
from seedkit.rollout import collect
from seedkit.train import (
    RunError,
    Stage1Config,
    Stage2Config,
    _step,
    alarms,
    batch_tasks,
    check,
    read_run,
    rewards_of,
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


def test_seed_without_its_term_is_grpo_bit_for_bit(env, tasks):
    grpo, seed = tiny(), tiny()
    stage2(grpo, env, tasks, replace(SMALL, method="grpo"))
    stage2(seed, env, tasks, replace(SMALL, method="seed", coef=0.0))
    assert same_weights(grpo, seed)
    full = tiny()
    stage2(full, env, tasks, replace(SMALL, method="seed", coef=0.3))
    assert not same_weights(grpo, full)


def test_the_update_does_not_depend_on_micro_batches(env, tasks, monkeypatch):
    from seedkit.policy import Policy

    config = replace(SMALL, method="sdar", updates=1, coef=0.3)
    whole = tiny()
    stage2(whole, env, tasks, config)
    batches = Policy.batches
    monkeypatch.setattr(Policy, "batches", lambda self, samples, budget=0: batches(self, samples, 1))
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


def test_alarms_name_each_sign_of_collapse():
    fine = {"entropy": 1.0, "kl": 0.0, "grad_norm": 1.0, "behaviour_gap": 0.0, "supervised": 1.0, "abs_shift": 0.1}
    fine |= {"skills": {"ok": 8}}
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


def test_a_broken_checkpoint_is_one_line(env, tasks, tmp_path):
    run = tmp_path / "run"
    stage2(tiny(), env, tasks, replace(SMALL, updates=1), run=run)
    (run / "checkpoints" / "last" / "optimizer.safetensors").write_bytes(b"not tensors")
    with pytest.raises(RunError, match="cannot be resumed from") as error:
        stage2(tiny(), env, tasks, replace(SMALL, updates=1), run=run, resume=True)
    assert "\n" not in str(error.value)
    (run / "protocol.json").write_text("{")
    with pytest.raises(RunError, match="not JSON"):
        stage2(tiny(), env, tasks, replace(SMALL, updates=1), run=run, resume=True)
    with pytest.raises(RunError, match="not a run directory"):
        read_run(tmp_path)


WORKER = """
import sys
from seedkit.envs import make, spread
from seedkit.policy import load_policy
from seedkit.train import Stage2Config, stage2
env = make("household")
tasks = spread(env.panel("train"), 6)
config = Stage2Config(updates=7, tasks=2, group=3, max_steps=8, coef=0.1)
stage2(load_policy("household-tiny"), env, tasks, config, run=sys.argv[1], resume=True,
       validation=tasks[:2], eval_every=3, save_every=3)
"""


def test_killed_at_three_random_points_a_run_resumes_to_the_same_numbers(tmp_path):
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    rng, done = random.Random(), 0
    for _ in range(3):
        job = subprocess.Popen([sys.executable, "-c", WORKER, str(killed)], env=environ)
        goal, begin = done + rng.randint(1, 2), time.monotonic()
        while done < goal and job.poll() is None and time.monotonic() - begin < 120:
            time.sleep(0.02)
            if (killed / "metrics.jsonl").exists():
                done = (killed / "metrics.jsonl").read_bytes().count(b"\n")
        time.sleep(rng.random() * 0.5)
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL, "it finished before it could be killed"
    subprocess.run([sys.executable, "-c", WORKER, str(killed)], env=environ, check=True)
    subprocess.run([sys.executable, "-c", WORKER, str(whole)], env=environ, check=True)
    assert plain(read_run(killed)[1]) == plain(read_run(whole)[1])
    a, b = (load_policy(run / "checkpoints" / "last") for run in (killed, whole))
    assert same_weights(a, b)
    assert {p.name for p in (killed / "checkpoints").iterdir()} == {p.name for p in (whole / "checkpoints").iterdir()}
