"""The kit's methods inside TRL's GRPOTrainer: what `stage2` does, on as many GPUs as `accelerate launch` finds.

Implements: `stage2`'s update, with TRL's optimizer, checkpoints, loggers, reference model and data parallelism (DDP,
FSDP, DeepSpeed), and with its vLLM engine where it is asked for. Our environments are played in TRL's `rollout_func`,
our analyzers write the skills, the teacher is scored as TRL scores, and the method's part joins TRL's loss.
Deviates: tasks come in TRL's order, not in `batch_tasks`'s; TRL's correction for vLLM weighs GRPO's part alone.
Leaves out: windows (TRL trains one sequence an episode), whole-vocabulary terms, frozen and moving teachers,
validation while it trains (`evaluate` reads the checkpoints), the inspector's ledger.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedkit.analyzer import Analyzer, SkillLibrary
from seedkit.envs.base import TextEnv
from seedkit.io import atomic_write, write_trajectories
from seedkit.methods import Method, method_losses, resolve, token_weights
from seedkit.objective import group_advantages, kl_penalty, masked_mean
from seedkit.policy import ADAPTER, ContextOverflow, Policy, Sample, load_policy
from seedkit.rescoring import combine, critical, rescore
from seedkit.rollout import collect
from seedkit.train import (
    RunError,
    Stage2Config,
    _analyzers,
    _Laps,
    _skill_metrics,
    _write,
    check,
    protocol_of,
    rewards_of,
    rollout_metrics,
)
from seedkit.types import Shifts, Skill, Task, Trajectory

SUPPORTED = "1.16"
"""TRL's minor version: the trainer overrides methods that TRL does not call public."""

try:
    _FOUND = metadata.version("trl")
except metadata.PackageNotFoundError:
    _FOUND = "no TRL"
if not _FOUND.startswith(f"{SUPPORTED}."):
    raise ImportError(
        f"seedkit.integrations.trl works with TRL {SUPPORTED}, found {_FOUND}: pip install 'seedkit[scale]'"
    )

from accelerate.utils import gather_object, is_peft_model  # noqa: E402 (after the check)
from datasets import Dataset  # noqa: E402
from trl.models.utils import unwrap_model_for_generation  # noqa: E402
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

NEEDED = {
    "loss_type": "dapo",  # one mean over all tokens of the batch, the kit's
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "mask_truncated_completions": False,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
}
"""Settings of TRL's that the kit's numbers rest on."""
PARTS = ("loss_policy", "loss_distill", "kl", "entropy", "behaviour_gap")
"""Metrics that are summed in the loss, over all tokens of an update."""


def _shared(config: Stage2Config) -> dict[str, Any]:
    """What TRL calls the fields of a `Stage2Config`, and the settings that are needed."""
    return NEEDED | {
        "learning_rate": config.lr,
        "max_steps": config.updates,
        "num_generations": config.group,
        "generation_batch_size": config.tasks * config.group,
        "beta": config.kl_coef,
        "temperature": config.temperature,
        "seed": config.seed,
    }


def grpo_args(config: Stage2Config, output_dir: Path | str, *, per_device: int, **options: Any) -> GRPOConfig:
    """TRL's arguments for the run that `config` describes: constant step size, no weight decay, one step a batch.

    Args:
        per_device: episodes in a forward and backward pass of a process; gradients are accumulated to the whole batch
            of `config.tasks * config.group` over the processes of `accelerate launch` (WORLD_SIZE).
        options: any other field of `GRPOConfig` (bf16, use_vllm, report_to, save_steps, ...).
    """
    batch, together = config.tasks * config.group, per_device * int(os.environ.get("WORLD_SIZE", 1))
    if batch % together:
        raise RunError(f"{batch} episodes an update do not divide into passes of {together} (all processes together)")
    if wrong := options.keys() & _shared(config).keys():
        raise RunError(f"{', '.join(sorted(wrong))}: decided by the experiment's configuration, not an option")
    own: dict[str, Any] = {"lr_scheduler_type": "constant", "disable_dropout": True, "activation_checkpointing": True}
    own |= {"bf16": False, "logging_steps": 1, "report_to": "none"}
    own |= options | {"gradient_accumulation_steps": batch // together} | _shared(config)
    return GRPOConfig(output_dir=str(output_dir), per_device_train_batch_size=per_device, **own)


class SelfDistillGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with the kit's environments, skills and methods.

    The output directory is a run directory of the kit as well: protocol.json, metrics.jsonl (names as in README's
    glossary, beside TRL's own) and trajectories/, the first update's and those of every `save_steps`.

    Args:
        policy: name or folder for `load_policy`; it is the start and the reference.
        env, tasks: what is played.
        config: the experiment, as for `stage2`.
        args: TRL's side, from `grpo_args`.
        method, analyzer: as for `stage2`; an analyzer that needs the live policy can be put into `trainer.analyzers`
            (`PolicyAnalyzer(trainer.policy)`).
        load: keywords for `load_policy`, such as dtype.
        options: passed on to GRPOTrainer (callbacks, optimizers, peft_config).

    Raises:
        RunError: for what cannot be carried, with what would be right.
    """

    args: GRPOConfig

    def __init__(
        self,
        policy: Path | str,
        env: TextEnv,
        tasks: Sequence[Task],
        config: Stage2Config,
        args: GRPOConfig,
        *,
        method: Method | None = None,
        analyzer: Analyzer | Sequence[Analyzer] | None = None,
        load: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check(config)
        for name, value in _shared(config).items():
            if getattr(args, name) != value:
                raise RunError(f"args.{name} must be {value!r} (see grpo_args), got {getattr(args, name)!r}")
        if args.use_vllm and (args.vllm_mode, args.vllm_tensor_parallel_size) != ("colocate", 1):
            raise RunError("episodes differ in length: vLLM needs vllm_mode='colocate', vllm_tensor_parallel_size=1")
        self.kit, self.out = config, Path(args.output_dir or ".")
        self.method = resolve(method or config.method, beta=config.beta, coef=config.coef)
        if self.method.whole or self.method.teacher_decay:
            raise RunError(f"{self.method.name}: whole-vocabulary terms and teachers that lag are left to `stage2`")
        start = load_policy(policy, **load or {})
        if start.layout.window is not None:
            raise RunError(f"{start.name}: TRL trains one sequence an episode; load it with a layout without window")
        if start.base is not None:
            raise RunError(f"{start.name} is a LoRA ({ADAPTER}): give its base, and a peft_config for a new one")
        self.env, self.tasks = env, {task.id: task for task in tasks}
        if not len(self.tasks) == len(tasks) >= config.tasks:
            raise RunError(f"an update takes {config.tasks} tasks, all different; got {len(tasks)}")
        self.policy = _LivePolicy(start, self)
        self.analyzers = _analyzers(self.policy, self.method, analyzer)
        if args.process_index == 0:  # hashing the weights of a large model takes a while
            protocol = protocol_of(start, env, tasks, config, self.method, self.analyzers)
            protocol |= {"trainer": f"TRL {_FOUND}", "per_device": args.per_device_train_batch_size}
            self.out.mkdir(parents=True, exist_ok=True)
            atomic_write(self.out / "protocol.json", json.dumps(protocol, indent=1))
        super().__init__(
            model=start.model,
            reward_funcs=episode,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(self.tasks)}),
            processing_class=start.tokenizer,
            **options,
        )
        self.rollout_func = self._rollout  # set here: TRL's warning that its interface may change is SUPPORTED's job
        if self._dist.is_fsdp and not self.use_vllm:
            raise RunError("a model sharded by FSDP cannot sample turn by turn: use_vllm=True in grpo_args")
        self._played: list[Trajectory] = []
        self._batch: dict[str, Any] | None = None
        self._sums = torch.zeros(1 + len(PARTS), device=self.accelerator.device)

    # --- what is played and scored ---------------------------------------------------------------------------------

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The weights gathered where they are sharded, dropout and gradient checkpointing off."""
        if self.use_vllm:
            yield
            return
        unwrapped = unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,  # type: ignore[arg-type]
        )
        with unwrapped as model, torch.no_grad():
            self.policy.model = model.get_base_model() if is_peft_model(model) else model
            yield

    def _rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's `rollout_func`: this process's share of the batch, each episode as a prompt and what followed it."""
        self._lap = _Laps()
        tasks = [self.tasks[name] for name in prompts]
        place = self.accelerator.process_index * len(prompts)  # TRL hands out groups in consecutive rows
        with self._sampling():
            self._played = collect(
                self.policy,
                self.env,
                tasks,
                members=[(place + n) % self.kit.group for n in range(len(tasks))],
                temperature=self.temperature,
                seed=self.kit.seed * 100_003 + self.state.global_step,
                max_steps=self.kit.max_steps,
                skills=SkillLibrary().write_for(tasks) if self.method.skill_in_prompt else None,
                max_new_tokens=self.kit.max_new_tokens,
            )
        self._lap("rollout")
        out: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": []}
        for trajectory in self._played:
            sample, known = self.policy.lay_out(trajectory), iter(trajectory.behaviour_logp)
            if not any(sample.mask):
                raise ContextOverflow(f"task {trajectory.task.id!r}: its first prompt leaves no room for an answer")
            first = sample.mask.index(True)
            out["prompt_ids"].append(list(sample.ids[:first]))
            out["completion_ids"].append(list(sample.ids[first:]))
            out["env_mask"].append([int(m) for m in sample.mask[first:]])
            out["logprobs"].append([next(known) if m else 0.0 for m in sample.mask[first:]])
        out["episode_reward"] = rewards_of(self._played, self.kit.invalid_penalty).tolist()
        return out

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with the kit's advantages and the teacher's log-probabilities in it."""
        out = super()._generate_and_score_completions(inputs)
        self._lap("reference")
        mine, now = self._played, self.method.at(self.state.global_step + 1)
        skills, shifts = self._hindsight(mine, now)
        mask = (out["completion_mask"] * out["tool_mask"]).bool()

        def spread(rows: list[Sequence[Any]]) -> Tensor:
            values = torch.tensor([v for row in rows for v in row], device=mask.device)
            return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)

        if shifts:
            out["teacher_logp"] = spread([s.teacher_logp for s in shifts])
            out["teacher_mask"] = spread([s.mask for s in shifts])
            out["step_mask"] = spread([critical(t, s) for t, s in zip(mine, skills, strict=True)])
        batch = gather_object(list(zip(mine, skills, shifts or [None] * len(mine), strict=True)))
        everyone, skills, all_shifts = ([record[k] for record in batch] for k in range(3))
        rewards = rewards_of(everyone, self.kit.invalid_penalty)
        groups = [n // self.kit.group for n in range(len(everyone))]
        begin = self.accelerator.process_index * len(mine)
        out["advantages"] = group_advantages(rewards, groups)[begin : begin + len(mine)].to(mask.device)
        row: dict[str, Any] = dict(rollout_metrics(everyone, rewards, groups))
        row |= _skill_metrics(self.env, everyone, skills, all_shifts if shifts else [], now)
        row |= {f"skills/{reason}": count for reason, count in row.pop("skills", {}).items()}
        for name, value in (row | self._lap.seconds).items():
            self._metrics["train"][name] = [float(value)]
        self._keep(everyone, skills, all_shifts if shifts else None)
        return out

    def _hindsight(self, mine: list[Trajectory], now: Method) -> tuple[list[Skill], list[Shifts]]:
        """As `stage2`: skills of the finished episodes, and the same tokens scored under them."""
        if not now.needs_teacher:
            return [Skill(reason="not asked for")] * len(mine), []
        with self._sampling():
            written = [_write(one, mine, now) for one in self.analyzers]
        self._lap("analysis")
        exact = not self.use_vllm and self.accelerator.mixed_precision == "no"  # else sampled in other numbers
        known: dict[str, Any] = {"student_logp": [t.behaviour_logp for t in mine] if exact else None}
        known |= {"critical_first": now.step_scale is not None}
        shifts = combine([rescore(self.policy, mine, skills, **known) for skills in written], now.combine)
        while self._anyone(False):
            self._score([Sample((self.policy.pad_id,) * 2, (False, True))])
        self._lap("rescoring")
        return written[0], shifts

    def _anyone(self, busy: bool) -> bool:
        """Whether any process has something to score: sharded weights need all of them to come along."""
        flag = torch.tensor(float(busy), device=self.accelerator.device)
        total: Any = self.accelerator.reduce(flag, "sum")
        return bool(total > 0)

    @torch.no_grad()
    def _score(self, samples: Sequence[Sample]) -> Tensor:
        """Log-probabilities [N] (nats) of the samples' response tokens, as TRL's own."""
        ids, attention, response = (x.to(self.accelerator.device) for x in self.policy.pad(samples))
        logp, *_ = super()._get_per_token_logps_and_entropies(self.model, ids, attention.long(), ids.shape[1] - 1)
        return logp[response[:, 1:]].float().cpu()

    def _keep(self, trajectories, skills, shifts) -> None:
        """Write what the inspector reads."""
        update = self.state.global_step + 1
        if self.accelerator.is_main_process and (update == 1 or update % self.state.save_steps == 0):
            kept = self.out / "trajectories" / f"{update:04d}.parquet"
            write_trajectories(kept, trajectories, skills=skills, shifts=shifts)

    # --- the loss --------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss at the method's advantages, and the method's term over the same denominator."""
        self._batch = dict(inputs)
        self._added = torch.zeros((), device=self.accelerator.device)
        try:
            return super()._compute_loss(model, self._batch) + self._added
        finally:
            self._batch = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        """TRL's; on the way to the loss the method sees them before TRL goes on."""
        scored = super()._get_per_token_logps_and_entropies(*args, **options)
        if self._batch is not None:
            self._join(self._batch, scored[0], scored[1].detach())
        return scored

    def _join(self, batch: dict[str, Any], logp: Tensor, entropy: Tensor) -> None:
        """Shape the advantages [B, T], keep the term for `_compute_loss`, add to the update's sums."""
        now = self.method.at(self.state.global_step + 1)
        mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
        given: dict[str, Any] = {name: batch.get(name) for name in ("teacher_logp", "teacher_mask", "step_mask")}
        given |= {"advantage": batch["advantages"], "response_mask": mask}
        clip: dict[str, Any] = {"clip_low": self.epsilon_low, "clip_high": self.epsilon_high}
        old = batch.get("old_per_token_logps")
        losses = method_losses(now, student_logp=logp, behaviour_logp=old, **given, **clip)
        if now.policy_gradient:
            alone = replace(now, term=None, fade=None)
            batch["advantages"] = token_weights(alone, student_logp=logp.detach(), **given)
        else:
            batch["advantages"] = torch.zeros_like(logp)
        if "distill" in losses:  # the denominator that TRL's "dapo" has
            passes = (self.args.steps_per_generation or 1) / self.current_gradient_accumulation_steps
            tokens = batch["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes / passes
            self._added = masked_mean(losses["distill"], mask, tokens)
        parts = {f"loss_{name}": loss for name, loss in losses.items()} | {"entropy": entropy}
        parts["behaviour_gap"] = (logp - batch["sampling_per_token_logps"]).abs()
        if self.beta:
            parts["kl"] = kl_penalty(logp, batch["ref_per_token_logps"], mask)
        nothing = torch.zeros_like(logp)
        sums = [mask, *(parts.get(name, nothing).detach() * mask for name in PARTS)]
        self._sums += torch.stack([part.sum().float() for part in sums])

    # --- what is told ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with the loss's sums as means over all tokens since the last time; metrics.jsonl follows."""
        total: Any = self.accelerator.reduce(self._sums, "sum")
        tokens, *sums = total.tolist()
        if tokens:
            for name, value in zip(PARTS, sums, strict=True):
                self._metrics["train"][name] = [value / tokens]
            self._sums = torch.zeros_like(self._sums)
        super().log(logs, start_time)
        if self.accelerator.is_main_process:
            rows = [{"update": row["step"]} | row for row in self.state.log_history if "success" in row]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            atomic_write(self.out / "metrics.jsonl", text)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """TRL's checkpoint, with the layout that `load_policy` needs."""
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        layout = json.dumps(asdict(self.policy.layout), indent=1)
        (Path(output_dir or self.out) / "layout.json").write_text(layout, encoding="utf-8")


def episode(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: what the rollout has counted."""
    return episode_reward


class _LivePolicy(Policy):
    """The policy that a trainer trains: sampled by vLLM where TRL has one, scored as TRL scores."""

    def __init__(self, start: Policy, trainer: SelfDistillGRPOTrainer) -> None:
        super().__init__(start.model, start.tokenizer, start.layout, start.name)
        self.trainer = trainer

    @property
    def version(self) -> str:
        """Name and update; hashing sharded weights every time would take longer than the update."""
        return f"{self.name}@{self.trainer.state.global_step}"

    def converse(self, rows: int) -> Any:
        """As `Policy.converse`."""
        return _VllmTalk(self, rows) if self.trainer.use_vllm else super().converse(rows)

    def token_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, token_budget: int | None = None
    ) -> list[Tensor]:
        """As `Policy.token_logprobs`, at the trainer's temperature."""
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        for pack in self.batches(samples, token_budget):
            chosen = [samples[n] for n in pack]
            self.trainer._anyone(True)
            parts = self.trainer._score(chosen).split([sum(s.mask) for s in chosen])
            for n, part in zip(pack, parts, strict=True):
                out[n] = part
        return out


class _VllmTalk:
    """A `Conversation` with TRL's vLLM engine, whose prefix cache keeps what was read; its own random numbers."""

    def __init__(self, policy: _LivePolicy, rows: int) -> None:
        self.engine: Any = policy.trainer.vllm_generation
        self.end_id, self.read = policy.end_id, [[] for _ in range(rows)]

    def say(
        self,
        contexts: Sequence[Sequence[int]],
        rngs: Sequence[np.random.Generator],
        max_new_tokens: Sequence[int],
        temperature: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As `Conversation.say`; an answer over its row's limit is cut, as the engine takes one limit for all."""
        told = [[*row, *context] for row, context in zip(self.read, contexts, strict=True)]
        own, now = self.engine.generation_kwargs, {"max_tokens": max(max_new_tokens), "temperature": temperature}
        self.engine.generation_kwargs = own | now | {"stop_token_ids": [self.end_id]}
        try:
            _, answers, logps, _ = self.engine.generate(prompts=told, images=None, num_generations=1)
        finally:
            self.engine.generation_kwargs = own
        answers, logps = ([row[:n] for row, n in zip(x, max_new_tokens, strict=True)] for x in (answers, logps))
        self.read = [[*row, *answer] for row, answer in zip(told, answers, strict=True)]
        known = [[math.nan if top[0] is None else top[0] for top in row] for row in logps]
        return [list(answer) for answer in answers], known

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but the given ones."""
        self.read = [self.read[n] for n in rows]
