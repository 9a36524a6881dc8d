"""Comparisons: arms, jobs that resume, results that read back, one table from any order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from seedkit import experiment
from seedkit.analyzer import RuleAnalyzer
from seedkit.envs import make, spread
from seedkit.evaluate import ProtocolError, Result
from seedkit.experiment import Arm, Outcome, Plan, read_results, run, summary, table, write_results
from seedkit.io import DataError, read_records
from seedkit.methods import METHODS, Method
from seedkit.policy import load_policy
from seedkit.train import RunError, Stage2Config, stage2
from seedkit.types import digest

TINY = Stage2Config(updates=2, tasks=2, group=4, lr=3e-4, max_steps=8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    env = make("household")
    panels = [spread(env.panel(split), 6) for split in ("train", "valid_unseen", "valid_seen")]
    start = Path(__file__).resolve().parents[1] / "data" / "policies" / "household-tiny"
    return Plan(start, panels[0], panels[1], panels[2], TINY, eval_every=1)


ARMS = [Arm.parse(text) for text in ("grpo", "seed:coef=0.3", "base", "base:prompted=true")]


@pytest.fixture(scope="module")
def finished(plan, tmp_path_factory) -> tuple[Path, list[Outcome]]:
    out = tmp_path_factory.mktemp("compared")
    return out, run(ARMS, [0, 1], plan, out, processes=2)


def told(outcomes) -> list[Outcome]:
    """Outcomes without the only field that differs from run to run."""
    return sorted((replace(o, seconds=0.0) for o in outcomes), key=lambda o: (o.arm, o.seed))


def test_an_answer_is_as_long_in_the_test_as_in_training(plan, tmp_path, monkeypatch):
    """Reasoning that a longer limit was set for must not be cut when it is measured, or nothing is valid."""
    short = replace(plan, config=replace(TINY, updates=1, max_new_tokens=1))
    (outcome,) = run([Arm.parse("grpo")], [0], short, tmp_path, processes=1)
    assert outcome.final.response_tokens == outcome.final.steps == 8
    asked = []
    monkeypatch.setattr("seedkit.train.evaluate", lambda *a, **how: asked.append(how) or outcome.final)
    stage2(load_policy(plan.start), make("household"), plan.train, short.config, validation=plan.validation)
    assert [how["max_new_tokens"] for how in asked] == [1]


# --- arms


def test_an_arm_is_a_method_with_switches():
    arm = Arm.parse("seed:coef=0.1,teacher_decay=1,failed_only=true,analyzer=irrelevant")
    assert arm.method == replace(METHODS["seed"], coef=0.1, teacher_decay=1, failed_only=True)
    assert (arm.name, arm.analyzer, arm.prompted) == (
        "seed:coef=0.1,teacher_decay=1,failed_only=true,analyzer=irrelevant",
        "irrelevant",
        False,
    )
    assert Arm.parse("base:prompted=true") == Arm("base:prompted=true", None, prompted=True)
    assert json.loads(json.dumps(arm.settings))["method"]["coef"] == 0.1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sead", "unknown method 'sead'"),
        ("", "unknown method ''"),
        ("seed:lambda=1", "no switch 'lambda'; there are analyzer"),
        ("seed:coef", "coef"),
        ("seed:coef=much", "coef"),
        ("seed:coef=-1", "coef must be finite and at least 0"),
        ("seed:term=gated2", "unknown term 'gated2'"),
        ("seed:name=x", "no switch 'name'"),
        ("base:coef=1", "no switch 'coef'; there are analyzer, prompted, start"),
        ("base:prompted=yes", "prompted must be true or false"),
    ],
)
def test_an_arm_that_makes_no_sense_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Arm.parse(text)


# --- running


def test_every_arm_gets_every_seed_and_its_results(finished):
    out, outcomes = finished
    assert [(o.arm, o.seed) for o in outcomes] == [(a.name, s) for s in (0, 1) for a in ARMS]
    grpo, _, base, prompted = outcomes[:4]
    assert len(grpo.curves["success"]) == 2 and None not in grpo.curves["validation_success"]
    assert grpo.best is not None and grpo.best_update in (1, 2) and grpo.tokens > 0 and grpo.seconds > 0
    assert base.best is None and base.curves == {} and base.tokens == 0
    assert base.final.protocol["prompted"] is None and prompted.final.protocol["prompted"] is not None
    assert told(read_results(out / "results.jsonl")) == told(outcomes)


def test_seeds_are_paired_tasks_in_the_same_order_for_every_arm(finished):
    out, _ = finished
    first = {}
    for arm in ("grpo", "seed_coef=0.3"):
        for seed in (0, 1):
            run_dir = out / "jobs" / arm / f"seed-{seed}" / "run"
            played = read_records(run_dir / "trajectories" / "0001.parquet")
            first[arm, seed] = [r.trajectory.task.id for r in played]
            sampled = [r.trajectory.response_ids for r in played]
            first[arm, seed, "sampled"] = digest(sampled)
    assert first["grpo", 0] == first["seed_coef=0.3", 0] != first["grpo", 1]
    assert first["grpo", 0, "sampled"] == first["seed_coef=0.3", 0, "sampled"]


def test_one_process_gives_the_numbers_of_two(finished, plan, tmp_path):
    _, outcomes = finished
    alone = run(ARMS[1:2], [1], plan, tmp_path, processes=1)
    assert told(alone) == told([outcomes[5]])


def test_what_is_finished_is_not_done_again(finished, plan, monkeypatch):
    out, outcomes = finished

    def never(*_):
        raise AssertionError("a finished job was played again")

    monkeypatch.setattr(experiment, "_play", never)
    assert told(run(ARMS, [0, 1], plan, out, processes=1)) == told(outcomes)


def test_recorded_jobs_are_not_run_again_elsewhere(finished, plan, monkeypatch, tmp_path):
    out, outcomes = finished
    recorded = read_results(out / "results.jsonl")
    monkeypatch.setattr(experiment, "_play", None)
    assert told(run(ARMS, [0, 1], plan, tmp_path, known=recorded, processes=1)) == told(outcomes)
    assert (tmp_path / "results.jsonl").read_bytes() == (out / "results.jsonl").read_bytes()
    with pytest.raises(ProtocolError, match="a known outcome of base had another plan: eval_every differ"):
        run(ARMS, [0], replace(plan, eval_every=2), tmp_path / "other", known=recorded, processes=1)


def test_another_plan_or_another_arm_of_a_name_is_refused(finished, plan):
    out, _ = finished
    with pytest.raises(ProtocolError, match="another plan: lr, updates differ"):
        run(ARMS, [0], replace(plan, config=replace(TINY, updates=3, lr=1e-4)), out, processes=1)
    with pytest.raises(ProtocolError, match=r"holds another arm named grpo: method.coef differ"):
        run([Arm("grpo", replace(METHODS["grpo"], coef=1.0))], [0], plan, out, processes=1)
    with pytest.raises(RunError, match="share a folder"):
        run([Arm("a:b"), Arm("a_b")], [0], plan, out, processes=1)


def test_a_job_that_fails_says_which(plan, tmp_path):
    with pytest.raises(RunError, match="seed, seed 4: unknown analyzer 'nobody'"):
        run([Arm("seed", METHODS["seed"], analyzer="nobody")], [4], plan, tmp_path, processes=1)


def test_a_method_of_ones_own_is_compared_in_other_processes(plan, tmp_path):
    def hinge(student_logp, teacher_logp, response_mask, *, beta, behaviour_logp):
        return (teacher_logp - student_logp).clamp(min=0.0)

    mine = Method("hinge", "A + λ·[Δ > 0]", "Only where the skill says more", term=hinge, coef=0.1)
    arms = [Arm("hinge", mine, analyzer=RuleAnalyzer()), Arm("grpo", METHODS["grpo"])]
    outcomes = run(arms, [0], plan, tmp_path, processes=2)
    assert outcomes[0].curves["supervised"] == [1.0, 1.0]
    assert outcomes[0].settings["method"]["term"].endswith("hinge")
    assert "hinge" in table(summary(outcomes))


def test_kill_9_loses_no_finished_job_and_no_number(finished, tmp_path):
    out, outcomes = finished
    command = [sys.executable, "-m", "seedkit.cli", "compare", "--methods", "grpo", "base"]
    command += ["--seeds", "0", "1", "--limit", "6", "--train-tasks", "6", "--validation", "6", "--eval-every", "1"]
    command += ["--updates", "2", "--tasks", "2", "--group", "4", "--out", str(tmp_path / "c"), "--processes", "1"]
    command += ["--start", "household-tiny", "--max-steps", "8"]
    first = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (ready := list(tmp_path.glob("c/jobs/*/*/outcome.jsonl"))):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {file: file.stat().st_mtime_ns for file in ready}
    again = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert {file: file.stat().st_mtime_ns for file in ready} == before
    same = [o for o in outcomes if o.arm in ("grpo", "base")]
    assert told(read_results(tmp_path / "c" / "results.jsonl")) == told(same)
    assert table(summary(same)).split()[:5] == again.stdout.split()[:5]


def test_no_job_goes_on_without_the_comparison(tmp_path):
    command = [sys.executable, "-m", "seedkit.cli", "compare", "--methods", "grpo", "--seeds", "0", "1"]
    command += ["--limit", "6", "--train-tasks", "6", "--validation", "0", "--updates", "5000", "--tasks", "1"]
    command += ["--group", "2", "--max-steps", "3", "--out", str(tmp_path), "--processes", "2"]
    first = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len([f for f in tmp_path.glob("jobs/*/*/run/metrics.jsonl") if f.stat().st_size]) < 2:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    workers = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert len(workers) >= 2 and not psutil.wait_procs(workers, timeout=60)[1]


# --- recorded results and the table


def made(arm: str, seed: int, successes: str, **protocol) -> Outcome:
    base = {"panel": "abc", "tasks": len(successes), "temperature": 0.4, "prompted": None, "training": {"lr": 1e-4}}
    kinds = tuple("pick" if n % 2 else "clean" for n in range(len(successes)))
    final = Result(arm, (tuple(float(c) for c in successes),), kinds, base | {"seed": seed} | protocol, 9.0, 40.0)
    return Outcome(arm, seed, {}, final, final, 2, {"success": [0.25, None]}, 100, 1.0)


FEW = [
    made("mine", 0, "1101"),
    made("mine", 1, "1111"),
    made("grpo", 0, "1001"),
    made("grpo", 1, "0101"),
    made("mine", 2, "1111"),
]


def test_the_table_by_hand_and_in_any_order():
    rows = summary(FEW)
    assert rows == summary(FEW[::-1]) and [r["arm"] for r in rows] == ["grpo", "mine"]
    grpo, mine = rows
    assert (grpo["runs"], grpo["success"], grpo["difference"], grpo["clean"], grpo["pick"]) == (
        2,
        0.5,
        None,
        0.25,
        0.75,
    )
    assert mine["runs"] == 3 and mine["success"] == pytest.approx(11 / 12)
    assert mine["difference"] == pytest.approx((0.25 + 0.5) / 2)  # seeds 0 and 1, which both have
    assert mine["difference_low"] < mine["difference"] < mine["difference_high"]
    assert mine["improvement"] == (0.75 + 0.75 + 0.75 + 0.5) / 4  # by task, over the pairs of runs
    text = table(rows)
    assert "91.7 [" in text and "+37.5 [" in text and text.splitlines()[1].startswith("grpo")


def test_different_protocols_do_not_share_a_table_or_a_file(tmp_path):
    other = made("other", 0, "1111", training={"lr": 1e-3}, temperature=1.0)
    with pytest.raises(ProtocolError, match="temperature, training.lr differ"):
        summary([*FEW, other])
    with pytest.raises(ProtocolError, match=r"other, seed 0, was not measured alike: temperature, training.lr"):
        write_results(tmp_path / "r.jsonl", [*FEW, other])
    with pytest.raises(ProtocolError, match="seed differs, so nothing is paired"):
        summary([made("grpo", 0, "10"), made("mine", 1, "11")])
    with pytest.raises(ValueError, match="no result named 'sdar'"):
        summary(FEW, baseline="sdar")


def test_results_read_back_equal_in_one_order(tmp_path):
    write_results(tmp_path / "a.jsonl", FEW)
    write_results(tmp_path / "b.jsonl", FEW[::-1])
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert told(read_results(tmp_path / "a.jsonl")) == told(FEW)
    with pytest.raises(DataError, match="no outcomes"):
        write_results(tmp_path / "c.jsonl", [])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda rows: rows[1:], "row 1: should hold the protocol"),
        (lambda rows: [], "row 1: should hold the protocol"),
        (lambda rows: [rows[0], rows[1] | {"final": None}], "row 2"),
        (lambda rows: [rows[0], {k: v for k, v in rows[1].items() if k != "curves"}], "row 2: .*curves"),
        (lambda rows: [rows[0], rows[1] | {"extra": 1}], "row 2: .*extra"),
        (
            lambda rows: [rows[0], rows[1], rows[2] | {"final": rows[2]["final"] | {"successes": ["10"]}}],
            "row 3: .*4 digits",
        ),
        (lambda rows: [rows[0], rows[1] | {"final": rows[1]["final"] | {"successes": ["10a1"]}}], "row 2: "),
    ],
)
def test_damaged_results_are_refused_by_row(tmp_path, damage, says):
    path = tmp_path / "r.jsonl"
    write_results(path, FEW)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in damage(rows)))
    with pytest.raises(DataError, match=says):
        read_results(path)
    write_results(path, FEW)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="row 6: .*cut"):
        read_results(path)
