"""Whole comparisons: several methods × several seeds from one start, on one panel, resumable job by job.

An `Arm` is what is compared, a method with its switches. A `Plan` is what all arms share, and so the protocol. A job
is one arm with one seed: a run directory of `stage2`, then its evaluation. Jobs of one seed see the same tasks in the
same order. `run` plays the jobs, one process a core; `summary` makes the table. Leaves out tuning: what was tried
before a setting was chosen belongs into a log.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from tqdm.auto import tqdm

from seedkit.analyzer import Analyzer, RuleAnalyzer, SkillLibrary, by_name
from seedkit.envs import DEFAULT, TextEnv, make, panel_hash
from seedkit.evaluate import ProtocolError, Result, compare, differing, evaluate
from seedkit.io import DataError, atomic_write, read_jsonl, read_object
from seedkit.methods import Method, resolve
from seedkit.policy import Policy, load_policy
from seedkit.rollout import collect
from seedkit.train import RunError, Stage1Config, Stage2Config, check, stage1, stage2, told
from seedkit.types import Task

CURVES = {
    "validation_success": ("success on the validation tasks, T = 0.4", "share"),
    "success": ("success of the training episodes", "share"),
    "entropy": ("entropy of the policy", "nats a token"),
    "kl": ("KL to the starting policy", "nats a token"),
    "grad_norm": ("gradient norm before clipping", ""),
    "supervised": ("trajectories that a skill reached", "share"),
    "skill_accuracy": ("skills that name the right workflow", "share"),
    "abs_shift": ("mean |Δ| of supervised tokens", "nats"),
    "gate": ("mean gate σ(βΔ) of supervised tokens", ""),
}
"""The metrics of `stage2` that a recorded outcome keeps, to six digits, with their title and unit."""


@dataclass(frozen=True)
class Arm:
    """One line of a comparison."""

    name: str
    """In tables, and of the job's folder."""
    method: Method | None = None
    """How it is trained; None leaves the start as it is."""
    analyzer: str | Analyzer | None = None
    """Who writes the skills, a word of `analyzer.by_name` or an analyzer; None: as the method says."""
    start: str | None = None
    """A policy to start from that is not the plan's (the ablation "no Stage 1")."""
    prompted: bool = False
    """The library's skill stands in the prompt at the test."""

    @classmethod
    def parse(cls, text: str) -> Arm:
        """An arm as the command line writes it: `seed`, `base:prompted=true`, `seed:coef=0.1,analyzer=irrelevant`.

        Before the colon a name in `METHODS`, or `base` for no training; behind it fields of `Arm` and `Method`.
        """
        head, _, tail = text.partition(":")
        method = None if head == "base" else resolve(head)
        own = {f.name for f in fields(cls)} - {"name", "method"}
        switches = (
            set() if method is None else {f.name for f in fields(Method)} - {"name", "formula", "title", "source"}
        )
        of_arm: dict[str, Any] = {}
        of_method: dict[str, Any] = {}
        for part in filter(None, tail.split(",")):
            key, _, value = part.partition("=")
            if key not in own | switches:
                raise RunError(f"{text}: no switch {key!r}; there are {', '.join(sorted(own | switches))}")
            try:
                given = json.loads(value)
            except ValueError:
                given = value
            (of_arm if key in own else of_method)[key] = given
        if not isinstance(of_arm.get("prompted", False), bool):
            raise RunError(f"{text}: prompted must be true or false")
        try:
            return cls(text, replace(method, **of_method) if method else None, **of_arm)
        except TypeError:
            raise RunError(f"{text}: a value is of the wrong type: {of_method}") from None

    @property
    def settings(self) -> dict[str, Any]:
        """All that makes this arm what it is, as JSON."""
        method = {k: told(v) for k, v in vars(self.method).items()} if self.method else None
        analyzer = self.analyzer if isinstance(self.analyzer, str | None) else type(self.analyzer).__name__
        return {"method": method, "analyzer": analyzer, "start": self.start, "prompted": self.prompted}


@dataclass(frozen=True)
class Plan:
    """What all arms of a comparison share."""

    start: str | Path
    """The policy that every arm starts from, by name or folder."""
    train: Sequence[Task]
    """Training tasks."""
    test: Sequence[Task]
    """The panel that the table is about."""
    validation: Sequence[Task] = ()
    """Tasks of the learning curves, which choose the best checkpoint; none: no curve, no best."""
    config: Stage2Config = Stage2Config()
    """Training; method, λ, β and seed are the arm's and the job's."""
    episodes: int = 1
    """Episodes a task in the test."""
    temperature: float = 0.4
    """Of the test's sampling."""
    eval_every: int = 5
    """Updates between two validations."""
    environment: str = DEFAULT
    """A name that `envs.make` knows."""

    def __post_init__(self):
        """Refuse a plan that no job could play."""
        check(self.config)
        for name in ("train", "test"):
            if not getattr(self, name):
                raise RunError(f"no {name} tasks")
        for name in ("episodes", "eval_every"):
            if getattr(self, name) < 1:
                raise RunError(f"{name} must be at least 1, got {getattr(self, name)}")

    def protocol(self) -> dict[str, Any]:
        """Everything that decides a number, but for arm and seed."""
        shared = {k: v for k, v in asdict(self.config).items() if k not in ("method", "coef", "beta", "seed")}
        panels = {"train": self.train, "validation": self.validation, "test": self.test}
        return {
            "start": load_policy(self.start).version,
            **{name: {"panel": panel_hash(list(tasks)), "count": len(tasks)} for name, tasks in panels.items()},
            **shared,
            "eval_every": self.eval_every,
            "test_episodes": self.episodes,
            "test_temperature": self.temperature,
            "torch": torch.__version__.split("+")[0],
        }


@dataclass(frozen=True)
class Outcome:
    """What one job found."""

    arm: str
    seed: int
    settings: dict[str, Any]
    """`Arm.settings`."""
    final: Result
    """The last policy on the test panel."""
    best: Result | None
    """The policy of the best validation on the test panel, if there was a validation."""
    best_update: int | None
    """Its update."""
    curves: dict[str, list[float | None]]
    """Metrics by name, a value an update; None where it was not measured."""
    tokens: int
    """Response tokens sampled in training."""
    seconds: float
    """Wall-clock seconds of training, validation left out."""


# --- running ------------------------------------------------------------------------------------------------------


def teach(
    folder: Path, env: TextEnv, policy: Policy, tasks: Sequence[Task], config: Stage1Config, *, progress: bool = False
) -> None:
    """Stage 1 of `policy`, in place, on an episode of each task, annotated by the rule; then it is in `folder`.

    Nothing is done where the folder is there already.
    """
    if folder.exists():
        return
    played = collect(policy, env, tasks, seed=config.seed, progress=progress)
    stage1(policy, played, RuleAnalyzer().write_skills(played), config, progress=progress)
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    policy.save(new)
    os.replace(new, folder)


def run(
    arms: Sequence[Arm],
    seeds: Sequence[int],
    plan: Plan,
    out: Path | str,
    *,
    known: Sequence[Outcome] = (),
    processes: int | None = None,
    progress: bool = False,
) -> list[Outcome]:
    """Every arm with every seed, whatever is missing of it in `out`; then all outcomes are in `out/results.jsonl`.

    A killed comparison goes on where each job was; finished jobs are not run again. More arms and seeds may be added
    later; another plan is refused.

    Args:
        arms: in any order; names must differ.
        seeds: of the training; each decides tasks, sampling and the test's episodes.
        out: folder of this comparison.
        known: outcomes recorded elsewhere under this very plan: jobs that need not be run.
        processes: jobs at a time; None: one a core. The numbers do not depend on it.

    Returns:
        The outcomes of these arms and seeds in the order of the jobs, seed by seed: what is there early is paired.

    Raises:
        ProtocolError: when `out` holds a comparison with another plan, or another arm of a name; names the fields.
        RunError: when arms share a name, or a job fails.
    """
    out, names = Path(out), [_folder(arm.name) for arm in arms]
    if len(set(names)) < len(names):
        raise RunError(f"two arms would share a folder: {', '.join(sorted(names))}")
    protocol, file = plan.protocol(), out / "protocol.json"
    if file.exists() and (differ := differing(read_object(file), protocol)):
        raise ProtocolError(f"{out} holds a comparison with another plan: {', '.join(differ)} differ")
    atomic_write(file, json.dumps(protocol, indent=1) + "\n")
    for outcome in known:
        if differ := differing(outcome.final.protocol["training"], protocol):
            raise ProtocolError(f"a known outcome of {outcome.arm} had another plan: {', '.join(differ)} differ")
        place = out / "jobs" / _folder(outcome.arm) / f"seed-{outcome.seed}" / "outcome.jsonl"
        if not place.exists():
            write_results(place, [outcome])
    jobs = [
        (arm, seed, plan, protocol, out / "jobs" / _folder(arm.name) / f"seed-{seed}", os.getpid())
        for seed in seeds
        for arm in arms
    ]
    processes = processes or joblib.cpu_count()
    trained = [job[4] for job in jobs if job[0].method]
    with (
        _watched(trained, plan.config.updates, progress),
        joblib.parallel_config(backend="loky", inner_max_num_threads=1),
    ):
        parallel = joblib.Parallel(n_jobs=processes, batch_size=1)  # pyright: ignore[reportArgumentType]
        outcomes: list[Any] = list(parallel(joblib.delayed(_job)(*job) for job in jobs))
    everything = [o for one in sorted(out.glob("jobs/*/*/outcome.jsonl")) for o in read_results(one)]
    write_results(out / "results.jsonl", everything)
    return outcomes


def _folder(name: str) -> str:
    return re.sub(r"[^\w.=,+-]", "_", name)


def _job(arm: Arm, seed: int, plan: Plan, protocol: dict[str, Any], folder: Path, owner: int) -> Outcome:
    """One arm with one seed, from wherever its folder stands, for as long as the process `owner` lives."""
    with _alone(folder), _one_thread():
        file = folder / "outcome.jsonl"
        if file.exists():
            (found,) = read_results(file)
            if differ := differing(found.settings, arm.settings):
                raise ProtocolError(f"{folder} holds another arm named {arm.name}: {', '.join(differ)} differ")
            return found
        try:
            outcome = _play(arm, seed, plan, protocol, folder, owner)
        except ValueError as error:
            raise RunError(f"{arm.name}, seed {seed}: {error}") from error
        write_results(file, [outcome])
        return outcome


def _play(arm: Arm, seed: int, plan: Plan, protocol: dict[str, Any], folder: Path, owner: int) -> Outcome:
    def leave_if_orphaned(*_: Any) -> None:
        if owner not in (os.getpid(), os.getppid()):  # killed: nobody waits for this job, and it can be resumed
            os._exit(1)

    env, rows = make(plan.environment), []
    policy = load_policy(arm.start or plan.start)
    if arm.method is not None:
        analyzer = arm.analyzer
        if isinstance(analyzer, str):
            own = "library" if arm.method.skills == "library" else "self"
            analyzer = by_name(analyzer, policy, instead_of=own)
        rows = stage2(
            policy,
            env,
            plan.train,
            replace(plan.config, method="grpo", coef=None, beta=None, seed=seed),
            method=arm.method,
            analyzer=analyzer,
            run=folder / "run",
            resume=True,
            validation=plan.validation,
            eval_every=plan.eval_every,
            save_every=plan.config.updates,
            on_update=leave_if_orphaned,
        )

    def test(policy: Policy) -> Result:
        found = evaluate(
            policy,
            env,
            plan.test,
            name=arm.name,
            episodes=plan.episodes,
            temperature=plan.temperature,
            seed=seed,
            max_steps=plan.config.max_steps,
            max_new_tokens=plan.config.max_new_tokens,
            skills=SkillLibrary().write_for(plan.test) if arm.prompted else None,
        )
        per_episode = {"steps": round(found.steps, 3), "response_tokens": round(found.response_tokens, 3)}
        return replace(found, protocol=found.protocol | {"training": protocol}, **per_episode)

    scores = {r["update"]: r["validation_success"] for r in rows if "validation_success" in r}
    best_update = max(scores, key=lambda u: (scores[u], u)) if scores else None
    final = test(policy)
    best = None
    if best_update is not None:
        best = final if best_update == len(rows) else test(load_policy(folder / "run" / "checkpoints" / "best"))
    kept = [key for key in CURVES if any(key in r for r in rows)]
    curves = {key: [float(f"{r[key]:.6g}") if key in r else None for r in rows] for key in kept}
    tokens = sum(round(r["tokens"] * plan.config.tasks * plan.config.group) for r in rows)
    seconds = [v for r in rows for k, v in r.items() if k.startswith("seconds_") and k != "seconds_validation"]
    return Outcome(
        arm.name, seed, arm.settings, final, best, best_update, curves, tokens, round(math.fsum(seconds), 1)
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process works in the folder; a process that dies lets go of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """The sums of a job must not depend on how many jobs run beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _watched(folders: Sequence[Path], updates: int, progress: bool) -> Iterator[None]:
    """A progress bar over the updates of all jobs, read from their metrics."""

    def done() -> int:
        files = (folder / "run" / "metrics.jsonl" for folder in folders)
        return sum(file.read_bytes().count(b"\n") for file in files if file.exists())

    def watch() -> None:
        while not over.wait(5.0):  # reading all jobs' metrics takes time from them
            bar.update(done() - bar.n)

    over = threading.Event()
    bar = tqdm(total=updates * len(folders), initial=done(), desc="compare", unit="update", disable=not progress)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        bar.close()


# --- recorded outcomes --------------------------------------------------------------------------------------------


def write_results(path: Path | str, outcomes: Sequence[Outcome]) -> None:
    """Outcomes of one protocol as JSONL, all or nothing: protocol and task kinds first, then a job a line."""
    if not outcomes:
        raise DataError(f"{path}: no outcomes to write")
    first = outcomes[0].final
    shared = {k: v for k, v in first.protocol.items() if k not in ("seed", "prompted")}
    lines = [{"protocol": shared, "kinds": first.kinds}]
    for o in sorted(outcomes, key=lambda o: (o.arm, o.seed)):
        for result in filter(None, (o.final, o.best)):
            if differ := differing(result.protocol, first.protocol):
                raise ProtocolError(f"{path}: {o.arm}, seed {o.seed}, was not measured alike: {', '.join(differ)}")
        lines.append(vars(o) | {"final": _packed(o.final), "best": _packed(o.best) if o.best else None})
    atomic_write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _packed(result: Result) -> dict[str, Any]:
    """What the file's first line and the job's own do not say; an episode of all tasks is a text of 0 and 1."""
    rows = ["".join(str(int(s)) for s in episode) for episode in result.successes]
    return {
        "successes": rows,
        "prompted": result.protocol["prompted"],
        "steps": result.steps,
        "response_tokens": result.response_tokens,
    }


def read_results(path: Path | str) -> list[Outcome]:
    """The outcomes of a file from `write_results`. Raises `DataError` naming row and field."""
    rows, torn = read_jsonl(path)
    if torn is not None:
        raise DataError(f"{path} row {len(rows) + 1}: should be one JSON object; the file is cut")
    if not rows or not {"protocol", "kinds"} <= rows[0].keys():
        raise DataError(f"{path} row 1: should hold the protocol and the task kinds of all results")
    outcomes = []
    for n, row in enumerate(rows[1:], 2):
        try:
            outcome: dict[str, Any] = row | {"final": _unpacked(row, "final", rows[0])}
            outcome["best"] = row["best"] and _unpacked(row, "best", rows[0])
            outcomes.append(Outcome(**outcome))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path} row {n}: not an outcome ({type(error).__name__}: {error})") from None
    return outcomes


def _unpacked(row: dict[str, Any], which: str, header: dict[str, Any]) -> Result:
    packed, kinds = row[which], tuple(header["kinds"])
    successes = tuple(tuple(map(float, episode)) for episode in packed["successes"])
    if not successes or any(len(episode) != len(kinds) or set(episode) - {0.0, 1.0} for episode in successes):
        raise ValueError(f"{which}: successes should be {len(kinds)} digits 0 or 1 an episode")
    protocol = header["protocol"] | {"seed": row["seed"], "prompted": packed["prompted"]}
    return Result(row["arm"], successes, kinds, protocol, packed["steps"], packed["response_tokens"])


# --- the table ----------------------------------------------------------------------------------------------------

_GAP = ("difference", "difference_low", "difference_high", "improvement")
_COLUMNS = {"arm", "runs", "success", "low", "high", *_GAP, "best", "steps", "tokens", "seconds"}


def summary(outcomes: Sequence[Outcome], *, baseline: str = "grpo") -> list[dict[str, Any]]:
    """A row an arm, baseline first: success, paired difference to the baseline, best checkpoint, kinds, cost.

    Keys: arm, runs; success, low, high; difference, difference_low, difference_high; improvement (probability that
    the arm beats the baseline on a task); best (mean success of the best checkpoints); steps (an episode); the task
    kinds; tokens and seconds (of training, means a run). Rates are between 0 and 1; None where a thing is not there.

    Raises:
        ProtocolError, ValueError: as `evaluate.compare`.
    """
    ordered = sorted(outcomes, key=lambda o: (o.arm != baseline, o.arm, o.seed))
    rows = []
    for row in compare([o.final for o in ordered], baseline=baseline):
        mine = [o for o in ordered if o.arm == row.name]
        best = [o.best.by_task.mean() for o in mine if o.best]
        gap = row.difference
        rows.append(
            {"arm": row.name, "runs": row.runs}
            | dict(zip(("success", "low", "high"), row.success, strict=True))
            | dict(
                zip(
                    ("difference", "difference_low", "difference_high", "improvement"), gap or [None] * 4, strict=True
                )
            )
            | {"best": float(np.mean(best)) if best else None, "steps": row.steps}
            | row.by_kind
            | {name: float(np.mean([getattr(o, name) for o in mine])) for name in ("tokens", "seconds")}
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A summary as plain text; rates in percent, tokens in thousands. Differences are to the first row."""
    width = max(len(r["arm"]) for r in rows) + 1
    kinds = {k: max(len(k) + 1, 6) for k in rows[0] if k not in _COLUMNS}  # and how wide their columns are
    head = f"{'':{width}}{'runs':>5}{'success [95 %]':>21}{'difference [95 %]':>24}{'P(better)':>10}"
    lines = [head + f"{'best':>6}" + "".join(f"{k:>{w}}" for k, w in kinds.items()) + f"{'k tokens':>9}{'s':>6}"]
    for r in rows:
        gap = "–"
        if r["difference"] is not None:
            gap = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * r[k] for k in _GAP[:3]))
        own = "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * r[k] for k in ("success", "low", "high")))
        better = "–" if r["improvement"] is None else f"{r['improvement']:.2f}"
        best = "–" if r["best"] is None else f"{100 * r['best']:.1f}"
        lines.append(
            f"{r['arm']:{width}}{r['runs']:>5}{own:>21}{gap:>24}{better:>10}{best:>6}"
            + "".join(f"{100 * r[k]:>{w}.0f}" for k, w in kinds.items())
            + f"{r['tokens'] / 1000:>9.0f}{r['seconds']:>6.0f}"
        )
    return "\n".join(lines)
