"""Writes the committed task panels: `python -m seedkit.envs.household_panels` (about five minutes on one core).

Every game is solved once by TextWorld's planner; its walkthrough goes into the panel, so that nobody has to plan
again. `train` and `valid_seen` share rooms and goals but no game; `valid_unseen` shares neither.
"""

from __future__ import annotations

import sys

from textworld import EnvInfos
from tqdm.auto import tqdm

from seedkit.envs.base import data_dir, write_panel
from seedkit.envs.household_engine import NamedPddlEnv
from seedkit.envs.household_games import build_game, household_task, sample_specs
from seedkit.types import digest

COUNTS = {"train": 384, "valid_seen": 96, "valid_unseen": 216}
SEED = 7


def solve(spec: dict) -> list[str]:
    """The planner's walkthrough of a game (stock TextWorld)."""
    engine = NamedPddlEnv(EnvInfos())
    engine.load(build_game(spec))
    plan = engine._pddl_state.replan(engine._entity_infos)
    if not plan:
        raise ValueError(f"the planner finds no solution for {spec}")
    return plan


def main() -> None:
    """Write all panels, or the ones named on the command line."""
    train = {digest(s) for s in sample_specs("train", COUNTS["train"], SEED)}
    for split in sys.argv[1:] or COUNTS:
        # valid_seen draws its own games; one that training has is left out
        specs = sample_specs(split, COUNTS[split] + (12 if split == "valid_seen" else 0), SEED)
        specs = [s for s in specs if split == "train" or digest(s) not in train][: COUNTS[split]]
        tasks = [household_task(split, s, solve(s)) for s in tqdm(specs, desc=split)]
        write_panel(data_dir() / "household" / f"{split}.jsonl", split, tasks)


if __name__ == "__main__":
    main()
