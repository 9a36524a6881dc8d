"""The kit inside TRL's trainer: the same update as `stage2`'s, on one process and on two."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from peft import LoraConfig
from transformers import TrainerCallback

import seedkit.integrations.trl as integration
from seedkit import train
from seedkit.envs import make
from seedkit.integrations.trl import SelfDistillGRPOTrainer, grpo_args
from seedkit.io import read_jsonl, read_records
from seedkit.methods import METHODS
from seedkit.policy import Conversation, load_policy
from seedkit.train import RunError, Stage2Config, stage2
from seedkit.types import Skill

# TRL 1.16 still calls transformers' activation checkpointing by its old names.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
ROOT = Path(__file__).resolve().parents[1]
SCALE = ROOT / "scale"
CONFIGS = sorted(SCALE.glob("*.yaml"))
START = "household-tiny-stage1"
SMALL = Stage2Config(updates=1, tasks=3, group=4, max_steps=10)
TERMS = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text().split("## Metrics")[1], re.MULTILINE)
GLOSSARY = set(re.findall(r"`(\w+)`", " ".join(TERMS))) - {"validation_success", "alarms", "skills"}


class Watch(TrainerCallback):
    """The gradients that the optimizer is given in the first update, by parameter, and what loggers are told."""

    def __init__(self):
        self.first, self.logged = {}, []

    def on_pre_optimizer_step(self, args, state, control, model: Any = None, **_):
        if state.global_step == 0:
            self.first = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    def on_log(self, args, state, control, logs: Any = None, **_):
        self.logged.append(dict(logs))


@pytest.fixture(scope="module")
def env():
    return make("household")


@pytest.fixture(scope="module")
def tasks(env):
    """Three of the shortest games; each is won in some of its episodes, in 4 to 10 turns."""
    return [[t for t in env.panel("train") if t.kind == "look"][n] for n in (2, 4, 9)]


class Steps:
    """A skill for the episode and one for its second turn."""

    def write_skills(self, trajectories):
        advice = [("find it and take it.", {1: "look at the lamp."}), ("turn on the lamp.", {2: "take it."})]
        return [Skill(*advice[n % 2], source=t.id) for n, t in enumerate(trajectories)]


def trainer_of(env, tasks, config, folder, *, policy=START, per_device=4, given=None, **options):
    options = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"} | options
    args = grpo_args(config, folder, per_device=per_device, **options)
    return SelfDistillGRPOTrainer(policy, env, tasks, config, args, callbacks=[Watch()], **given or {})


def watched(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))


def told_in(folder):
    return read_jsonl(folder / "metrics.jsonl").rows


def through_kit(env, tasks, config, monkeypatch, analyzer=None):
    """First update's gradients of a run through `stage2`, and its metrics an update."""
    first, step = {}, train._step

    def spy(policy, optimizer):
        grads = {name: p.grad.clone() for name, p in policy.own().items()}
        first.update(grads if not first else {})
        return step(policy, optimizer)

    monkeypatch.setattr(train, "_step", spy)
    return first, stage2(load_policy(START), env, tasks, config, analyzer=analyzer)


def close(told, row, tolerance):
    """Whether every metric of the glossary that `row` has stands in `told`, with the same value."""
    counts = {f"skills/{reason}": count for reason, count in row.get("skills", {}).items()}
    for name, value in (row | counts).items():
        if name in GLOSSARY or name.startswith("skills/"):
            assert told[name] == pytest.approx(value, abs=tolerance), name


@pytest.mark.parametrize(("method", "analyzer"), [("grpo", None), ("rlsd", None), ("opid", Steps())])
def test_the_same_update_inside_the_kit_and_through_trl(method, analyzer, env, tasks, tmp_path, monkeypatch):
    config = replace(SMALL, method=method, coef=0.5)
    kit, (row,) = through_kit(env, tasks, config, monkeypatch, analyzer)
    trainer = trainer_of(env, tasks, config, tmp_path, given={"analyzer": analyzer})
    trainer.train()
    same_gradients(watched(trainer).first, kit)
    close(told_in(tmp_path)[0], row, 1e-5)


def same_gradients(one, other):
    assert one.keys() == other.keys() and any(bool(grad.any()) for grad in one.values())
    for name, grad in one.items():
        torch.testing.assert_close(grad, other[name], atol=1e-5, rtol=0)


def test_seed_through_trl_is_logged_kept_and_resumed(env, tasks, tmp_path, monkeypatch):
    config = replace(SMALL, coef=0.5, updates=2)  # λ large enough to see
    kit, rows = through_kit(env, tasks, config, monkeypatch)
    assert rows[0]["grad_norm"] < 1  # not clipped: TRL shows its gradients after that, the kit before
    trainer: Any = trainer_of(env, tasks, config, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    same_gradients(watched(trainer).first, kit)
    told = told_in(tmp_path)
    close(told[0], rows[0], 1e-5)
    close(told[1], rows[1], 1e-3)  # begins 1e-6 apart, after Adam
    assert told[0]["loss"] == pytest.approx(rows[0]["loss_policy"] + rows[0]["loss_distill"], abs=1e-5)
    assert rows[1]["kl"] > 1e-5 and 0 < rows[0]["success"] < 1  # the comparison has something to compare

    logged = watched(trainer).logged[0]  # what TensorBoard, W&B and trackio get
    assert logged.keys() > GLOSSARY and {"skills/ok", "seconds_rollout", "seconds_rescoring"} < logged.keys()
    assert {type(value) for value in logged.values()} <= {int, float}

    records = read_records(tmp_path / "trajectories" / "0002.parquet")
    assert [r.trajectory.policy_version for r in records] == [f"{START}@1"] * 12
    assert sum(r.trajectory.success for r in records) / 12 == told[1]["success"]
    assert all(r.skill is not None and r.shifts is not None and any(r.shifts.mask) for r in records)
    live = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    saved = load_policy(tmp_path / "checkpoint-2").model.state_dict()
    assert all(torch.equal(saved[name], live[name]) for name in saved)

    again = trainer_of(env, tasks, config, tmp_path, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed = told_in(tmp_path)
    assert [row["update"] for row in resumed] == [1, 2]
    close(resumed[1], told[1], 1e-6)


def test_two_processes_make_the_update_of_one(tmp_path):
    # three groups of four on two processes: the second group is played half here and half there
    config = '{"updates": 1, "tasks": 3, "group": 4, "max_steps": 8, "coef": 0.5, "lr": 1.0}'
    options = ["--policy", START, "--limit", "3", "--config", config]
    options += ["--args", '{"optim": "sgd", "use_cpu": true, "disable_tqdm": true, "save_strategy": "no"}']
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", SCALE / "two_cpu_processes.yaml"]
    command = [*launch, SCALE / "train.py", *options, "--out", tmp_path / "two", "--per-device", "3"]
    known = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    main = runpy.run_path(str(SCALE / "train.py"))["main"]
    main([*options, "--out", str(tmp_path / "one"), "--per-device", "4"])
    (alone,), (together,) = told_in(tmp_path / "one"), told_in(tmp_path / "two")
    close(together, alone, 1e-5)
    assert alone["grad_norm"] < 1  # so that the step is the gradient: plain SGD, step size 1
    start, *ends = (
        load_policy(p).model.state_dict() for p in (START, tmp_path / "one/final", tmp_path / "two/final")
    )
    one, two = ({name: start[name] - end[name] for name in start} for end in ends)
    same_gradients(one, two)


def test_a_lora_of_trl_is_a_policy_for_the_kit(env, tasks, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    config = replace(SMALL, tasks=1, group=2, max_steps=3)
    trainer = trainer_of(env, tasks[:1], config, tmp_path, per_device=2, given={"peft_config": lora})
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert trainer.ref_model is None  # the base is the reference
    policy = load_policy(tmp_path / "final")
    assert policy.base is not None and all("lora_" in name for name in policy.own())
    assert any(bool(p.any()) for name, p in policy.own().items() if "lora_B" in name)  # 0 before the update
    sample = policy.lay_out(trainer._played[0])
    torch.testing.assert_close(trainer._score([sample]), policy.token_logprobs([sample])[0], atol=1e-5, rtol=0)


class Engine:
    """In place of TRL's vLLM engine: whole prompts in, tokens and log-probabilities of the trainer's model out."""

    def __init__(self, policy):
        self.policy, self.generation_kwargs, self.asked = policy, {"seed": 0}, []

    def sync_weights(self):
        self.asked.append("sync")

    @torch.no_grad()
    def generate(self, prompts, images, num_generations):
        given, n = self.generation_kwargs, len(prompts)
        self.asked.append((given["max_tokens"], given["temperature"], given["stop_token_ids"], given["seed"]))
        rngs = [np.random.default_rng(k) for k in range(n)]
        limits = [given["max_tokens"]] * n
        answers, logps = Conversation(self.policy, n).say(prompts, rngs, limits, given["temperature"])
        return prompts, answers, [[[p] for p in row] for row in logps], None


def test_vllm_is_asked_turn_by_turn(env, tasks, tmp_path):
    trainer: Any = trainer_of(env, tasks, SMALL, tmp_path)
    trainer.vllm_generation = engine = Engine(trainer.policy)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.train()
    (row,) = told_in(tmp_path)
    assert engine.asked[0] == "sync" and engine.asked.count("sync") == 1  # the analysis is of the same weights
    longest, end = env.max_action_tokens, [trainer.policy.end_id]
    assert {str(asked) for asked in engine.asked[1:]} == {str((longest, 1.0, end, 0)), str((64, 0.0, end, 0))}
    assert engine.generation_kwargs == {"seed": 0}
    assert row["behaviour_gap"] < 1e-5 and row["supervised"] == 1 and 4 <= row["steps"] <= 10
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"loss_type": "grpo"}}, "loss_type: decided by the experiment"),
        ({"per_device": 5}, "12 episodes an update do not divide into passes of 5"),
        ({"config": replace(SMALL, tasks=4, group=3)}, "an update takes 4 tasks, all different; got 3"),
        ({"method": METHODS["js_full"]}, "js_full: whole-vocabulary terms and teachers that lag"),
        ({"method": replace(METHODS["seed"], teacher_decay=0.9)}, "seed: whole-vocabulary terms and teachers that"),
        ({"options": {"use_vllm": True, "vllm_mode": "server"}}, "vllm_mode='colocate'"),
    ],
)
def test_what_cannot_be_carried_is_refused(change, message, env, tasks, tmp_path):
    options = {"per_device": change.get("per_device", 4), "given": {"method": change.get("method")}}
    with pytest.raises(RunError, match=re.escape(message)):
        trainer_of(env, tasks, change.get("config", SMALL), tmp_path, **options, **change.get("options", {}))


def test_arguments_of_another_experiment_are_refused(env, tasks, tmp_path):
    args = grpo_args(SMALL, tmp_path, per_device=4, use_cpu=True)
    with pytest.raises(RunError, match=re.escape("args.learning_rate must be 0.0003 (see grpo_args), got 0.0001")):
        SelfDistillGRPOTrainer(START, env, tasks, replace(SMALL, lr=3e-4), args)


def test_windows_and_loras_are_refused(env, tasks, tmp_path):
    policy = load_policy("household-tiny", window=2)
    policy.save(tmp_path / "window")
    policy.add_lora("household-tiny")
    policy.save(tmp_path / "lora")
    for name, message in (("window", "TRL trains one sequence an episode"), ("lora", "lora is a LoRA")):
        with pytest.raises(RunError, match=message):
            trainer_of(env, tasks, SMALL, tmp_path / "run", policy=tmp_path / name)


@pytest.mark.parametrize("found", ["1.15.4", "1.160.0", "2.0.0", None])
def test_another_trl_is_refused_with_the_version_that_works(found, monkeypatch):
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    message = f"works with TRL 1.16, found {found or 'no TRL'}: pip install 'seedkit[scale]'"
    with pytest.raises(ImportError, match=re.escape(message)):
        runpy.run_path(str(integration.__file__))


def test_nothing_else_in_the_kit_imports_trl():
    pattern = re.compile(r"^\s*(from|import) (trl|accelerate|seedkit\.integrations)\b", re.MULTILINE)
    files = [path for folder in ("seedkit", "widgets") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if pattern.search(path.read_text(encoding="utf-8"))] == ["trl.py"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_accelerate_reads_the_configurations(path):
    config: Any = load_config_from_file(str(path))
    given = ["--config_file", str(path), "scale/train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert args.num_processes == config.num_processes and args.num_machines == config.num_machines
    assert args.use_fsdp == (config.distributed_type == "FSDP")
    if args.use_fsdp:
        assert args.fsdp_version == 2 and args.fsdp_state_dict_type == "FULL_STATE_DICT"
        assert config.num_processes == 8 * config.num_machines
    assert args.mixed_precision == config.mixed_precision


def test_the_sizing_table_is_what_its_code_computes():
    text = (SCALE / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
    assert list(names["table"]()) == re.findall(r"^\| \S+ B \|.*\|$", text, re.MULTILINE)
    states, engine, passing, sampling, computing = names["size"]("7 B", 8)
    assert states == pytest.approx(20 * 7.62 / 8)  # 20 bytes a parameter: weights, gradients, AdamW, reference
    # 13.4 M tokens of 7.62e9 parameters, ten passes: 2.05e18 for the products with weights, some for attention
    assert computing > 128 * 10_500 * 2 * 7.62e9 * 10 / (8 * 989e12 * 0.4)
    assert sampling > 4_700 * 2 * 7.62e9 / (3.35e12 * 0.4) and 0 < passing < engine
