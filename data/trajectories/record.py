"""Record the example trajectories in this folder: `python data/trajectories/record.py`, a minute on one core.

household-tiny plays training games four times each; the first game of three kinds whose group holds successes and
failures is kept. The same episodes are scored under the right skill, under a wrong one, and with a skill that never
arrived: one file each.
"""

from pathlib import Path

from seedkit.envs import make, spread
from seedkit.envs.household_skills import WRONG_PLANS, skill_text
from seedkit.io import write_trajectories
from seedkit.policy import load_policy
from seedkit.rescoring import rescore
from seedkit.rollout import collect
from seedkit.types import Skill

KINDS = ("heat", "look", "two")
GROUP = 4


def main() -> None:
    """Play, score three times, write."""
    env, policy = make("household"), load_policy("household-tiny")
    kept = {}
    for task in spread(env.panel("train"), 96):
        if task.kind in KINDS and task.kind not in kept:
            played = collect(policy, env, [task], group=GROUP, seed=7, max_steps=12)
            if len({t.success for t in played}) == 2:
                kept[task.kind] = played
    trajectories = [t for kind in KINDS for t in kept[kind]]
    kinds = [t.task.kind for t in trajectories]
    stories = {
        "right": [Skill(skill_text(k, k), author="household_skills") for k in kinds],
        "wrong": [Skill(skill_text(k, WRONG_PLANS[k][0]), author="household_skills") for k in kinds],
        "absent": [Skill(author="household_skills", reason="left out of the teacher's prompt")] * len(kinds),
    }
    for name, skills in stories.items():
        path = Path(__file__).parent / f"household-{name}.jsonl"
        write_trajectories(path, trajectories, skills=skills, shifts=rescore(policy, trajectories, skills))
        print(f"{path.name}: {len(trajectories)} trajectories, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
