"""`seedkit inspect`: recorded episodes as a page, scored again under a skill of one's own where one is given."""

from __future__ import annotations

from pathlib import Path

from seedkit.analyzer import read_skill
from seedkit.foreign import read_foreign, recognise, retokenize
from seedkit.io import DataError, Record, read_ledger, read_records
from seedkit.policy import Policy, load_policy
from seedkit.rescoring import contrast, rescore
from seedkit.types import Trajectory

from .inspector import SkillInspector
from .signals import ViewError, advantages_of


def inspect(
    source: Path,
    out: Path,
    *,
    update: int | None = None,
    trajectory: str | None = None,
    skill: Path | None = None,
    model: str | None = None,
    method: str | None = None,
) -> str:
    """Write the page and say in a line what it shows.

    Args:
        source: a run directory, a file from `write_trajectories`, or other people's rollouts (`read_foreign`).
        out: the page to write.
        update: of a run, whose trajectories to show; None takes the last that were kept.
        trajectory: number (from 1) or id of the only one to show.
        skill: text (or library) file of a skill to score all shown episodes under; None shows the recorded shifts.
        model: name or folder of the policy that scores; None takes the one that played, by name, or the run's.
            Episodes in another policy's tokens are tokenized again. Other people's rollouts need one, and a skill.
        method: a name in METHODS; None takes the recorded one, else "seed".

    Raises:
        ViewError: naming the file and what would be right.
    """
    file = _file(source, update)
    records, foreign, about = _records(file, model)
    beside = file.with_suffix(".json")
    ledger = read_ledger(beside) if foreign is None and beside.exists() else None
    numbers = range(len(records))
    if trajectory is not None:
        ids = {r.trajectory.id: n for n, r in enumerate(records)} | {str(n + 1): n for n in numbers}
        if trajectory not in ids:
            raise ViewError(f"{file}: no trajectory {trajectory!r}; give a number from 1 to {len(records)} or an id")
        numbers = [ids[trajectory]]
    shown = [records[n].trajectory for n in numbers]
    skills, shifts, contrasts = [records[n].skill for n in numbers], [records[n].shifts for n in numbers], None
    policy = foreign or _policy(file, source, model, [t.protocol.get("policy") for t in shown])
    other = model is not None and foreign is None and any(_not_its_own(policy, t) for t in shown)
    if other:
        shown, shifts = [retokenize(t, policy) for t in shown], [None] * len(shown)  # theirs are of other tokens
        about = "; retokenized"
    if skill is not None:
        skills = [read_skill(skill)] * len(shown)
    if skill is not None or (other and any(skills)):
        shifts = rescore(policy, shown, skills)
    elif not any(shifts):
        raise ViewError(f"{file}: no shifts are recorded in it; give a skill to score under (--skill FILE)")
    versions = {s.policy_version for s in shifts if s is not None}
    if versions == {policy.version}:
        contrasts = contrast(policy, shown, skills)
    everyone = ledger.advantage if ledger else advantages_of([r.trajectory for r in records])
    whole = ledger if ledger is not None and len(shown) == len(records) and not other else None
    chosen = method or (ledger.method if ledger else "seed")
    recorded = ledger is not None and chosen == ledger.method
    view = SkillInspector(
        shown,
        shifts,
        skills=skills,
        contrasts=contrasts,
        advantages=[everyone[n] for n in numbers],
        ledger=whole,
        method=chosen,
        beta=ledger.beta if ledger and recorded else None,
        coef=ledger.coef if ledger and recorded else None,
        policy=policy,
    )
    view.to_html(out)
    reached = sum(s is not None and s.skill_tokens > 0 for s in shifts)
    played = {t.policy_version for t in shown}
    note = "" if versions <= played else f"; played by {', '.join(sorted(played))}, scored by {policy.version}"
    return f"{out}: {len(shown)} trajectories, a skill reached the teacher in {reached}{note}{about}"


def _records(file: Path, model: str | None) -> tuple[list[Record], Policy | None, str]:
    """A file's records; of other people's rollouts also the policy that made their tokens, and what to tell."""
    try:
        return read_records(file), None, ""
    except DataError:
        if (format := recognise(file)) is None:
            raise
    if model is None:
        raise ViewError(f"{file}: other people's rollouts ({format}); name the policy that scores them (--model)")
    policy = load_policy(model)
    read = read_foreign(file, policy)
    share = max(max(t.protocol["unknown_tokens"].values()) for t in read.trajectories)
    about = f"; retokenized from {format}, at most {share:.0%} of a trajectory's tokens unknown to the tokenizer"
    if read.skipped:
        about += f"; {len(read.skipped)} skipped: " + ", ".join(f"{n} {why}" for why, n in read.reasons.most_common())
    return [Record(t) for t in read.trajectories], policy, about


def _not_its_own(policy: Policy, trajectory: Trajectory) -> bool:
    """Whether another tokenizer wrote the trajectory: what the policy would write is not what stands there."""
    turns, skill = trajectory.turns, trajectory.skill
    written = (policy.prompt_ids(turns[:n], t.observation, t.admissible, skill) for n, t in enumerate(turns))
    return any(ids != list(turn.context_ids) for ids, turn in zip(written, turns, strict=True))


def _file(source: Path, update: int | None) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise ViewError(f"{source}: no such file or run directory")
    kept = sorted((source / "trajectories").glob("*.parquet"))
    if not kept:
        raise ViewError(f"{source}: not a run directory with trajectories (no trajectories/*.parquet)")
    if update is None:
        return kept[-1]
    file = source / "trajectories" / f"{update:04d}.parquet"
    if not file.exists():
        raise ViewError(f"{source}: update {update} was not kept; there are {', '.join(p.stem for p in kept)}")
    return file


def _policy(file: Path, source: Path, model: str | None, played: list[str | None]) -> Policy:
    if model is None and source.is_dir():
        return load_policy(source / "checkpoints" / "last")
    names = {name for name in played if name}
    if model is None and len(names) != 1:
        raise ViewError(f"{file}: says not which policy played; name the one that scores (--model)")
    return load_policy(model or names.pop())
