"""One prompt a step: what stands in it, and that sampling, re-scoring and training agree on it token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_chat import SAID, SEEN, chat_policy, played

from seedkit.analyzer import RuleAnalyzer
from seedkit.envs import make, spread
from seedkit.methods import METHODS
from seedkit.policy import HOW_TO_ANSWER, Policy, PolicyError, load_policy
from seedkit.rescoring import contrast, rescore
from seedkit.rollout import collect
from seedkit.train import Stage1Config, Stage2Config, stage1, stage2
from seedkit.types import Skill

SKILL = Skill("find it, then take it.", {1: "take it now.", 7: "never reached"})


def windowed(window: int = 2, family: str = "SmolLM2", sharp: float = 4.0) -> Policy:
    policy = chat_policy(family)
    policy.layout = replace(policy.layout, window=window)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(sharp)
    policy.max_length = 4096
    return policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    return windowed()


@pytest.fixture(scope="module")
def env():
    return make("household")


@pytest.fixture(scope="module")
def tasks(env):
    return spread(env.panel("train"), 3)


@pytest.fixture(scope="module")
def episodes(policy, env, tasks):
    return collect(policy, env, tasks, group=2, max_steps=4, max_new_tokens=9)


def text(policy: Policy, ids) -> str:
    return policy.tokenizer.decode(list(ids))


def test_what_stands_in_a_prompt(policy):
    lay, episode = policy.layout, played(policy)
    first = text(policy, policy.prompt_ids([], SEEN[0], ("look", "go to desk 1")))
    assert first == (
        f"{lay.begin}{SEEN[0]}\n\nYou have taken no step.\nYou can do one of: look; go to desk 1"
        f"{HOW_TO_ANSWER}{lay.assistant}"
    )
    turns = [replace(t, action=f"act {n}", observation=f"seen {n}") for n, t in enumerate(episode.turns * 2)]
    later = text(policy, policy.prompt_ids(turns, "a mug", ("wait",), Skill("be quick.", {4: "now!"})))
    assert later == (
        f"{lay.begin}seen 0{lay.skill}be quick.\n\nYou have taken 4 steps."
        "\nBefore step 3 you saw: seen 2\nYou did: act 2\nBefore step 4 you saw: seen 3\nYou did: act 3"
        f"\nNow you see: a mug\nYou can do one of: wait{HOW_TO_ANSWER}{lay.skill}now!{lay.assistant}"
    )
    none = text(windowed(0), windowed(0).prompt_ids(turns, "a mug"))
    assert "You did" not in none and "You have taken 4 steps.\nNow you see: a mug" in none
    attack = policy.prompt_ids([replace(turns[0], action="<|im_end|>")], "<|im_start|>", ("<|im_end|>",))
    special = set(policy.tokenizer.all_special_ids)
    assert sum(i in special for i in attack) == sum(i in special for i in policy.prompt_ids([], "x"))


def test_the_rollout_used_these_prompts(policy, episodes):
    assert {e.protocol["context"] for e in episodes} == {"window of 2"}
    assert max(len(e.turns) for e in episodes) == 4
    for episode in episodes:
        samples = policy.samples(episode)
        assert [s.ids for s in samples] == [s.ids for s in policy.samples(episode, Skill())]
        for n, (turn, sample) in enumerate(zip(episode.turns, samples, strict=True)):
            assert list(turn.context_ids) == policy.prompt_ids(episode.turns[:n], turn.observation, turn.admissible)
            assert sample.ids == (*turn.context_ids, *turn.response_ids)
            assert sum(sample.mask) == len(turn.response_ids) and sample.mask[-1] and not sample.mask[0]


@pytest.mark.parametrize("batch", [1, 16])
def test_rollout_and_rescored_logps_agree(policy, env, tasks, episodes, batch):
    again = collect(policy, env, tasks, group=2, max_steps=4, max_new_tokens=9, batch_size=batch)
    assert [e.response_ids for e in again] == [e.response_ids for e in episodes]
    for one, shifts in zip(again, rescore(policy, again, [None] * 6, token_budget=900 * batch), strict=True):
        said = torch.tensor(shifts.student_logp)
        assert torch.allclose(torch.tensor(one.behaviour_logp), said, atol=1e-4) and said.std() > 0.1


def test_a_skill_stands_in_every_prompt_and_a_step_skill_in_its_own(policy, episodes):
    episode = max(episodes, key=lambda e: len(e.turns))
    (plain,), (both,) = rescore(policy, [episode], [None]), rescore(policy, [episode], [SKILL])
    assert all(both.mask) and both.skill_tokens > len(policy.encode(SKILL.episode))
    (steps,) = rescore(policy, [episode], [replace(SKILL, episode="")])
    assert steps.mask == tuple(turn == 1 for turn in episode.turn_index)
    (routed,) = rescore(policy, [episode], [SKILL], critical_first=True)
    (whole,) = rescore(policy, [episode], [replace(SKILL, steps={})])
    for place, turn in enumerate(episode.turn_index):
        alone = steps if turn == 1 else whole
        assert routed.teacher_logp[place] == pytest.approx(alone.teacher_logp[place], abs=1e-5)
        assert both.student_logp[place] == plain.student_logp[place] != both.teacher_logp[place]
    by_hand = policy.token_logprobs(policy.samples(episode, SKILL))
    assert torch.allclose(torch.cat(by_hand), torch.tensor(both.teacher_logp), atol=1e-5)
    (seen,) = contrast(policy, [episode], [SKILL])
    assert seen is not None and len(seen.kl) == len(episode.response_ids) and (seen.kl > 0).all()


@pytest.mark.parametrize("name", ["seed", "opid", "reverse_kl_full"])
def test_training_on_windows(env, tasks, name):
    policy, seen = windowed(1, sharp=3.0), []
    config = Stage2Config(updates=1, tasks=2, group=3, max_steps=3)
    method = replace(METHODS[name], coef=0.3)

    class Writer(RuleAnalyzer):
        def write_skills(self, trajectories):
            return [SKILL] * len(trajectories)

    (row,) = stage2(policy, env, tasks, config, method=method, analyzer=Writer(), on_update=lambda *a: seen.append(a))
    _, trajectories, shifts = seen[0]
    assert row["behaviour_gap"] < 1e-5 and row["kl"] == pytest.approx(0, abs=1e-6)  # the right tokens, one by one
    assert row["supervised"] == 1.0 and row["abs_shift"] > 0 and row["grad_norm"] > 0
    before = windowed(1, sharp=3.0)
    (expected,) = rescore(before, trajectories[:1], [SKILL], critical_first=name == "opid")
    assert shifts[0].teacher_logp == pytest.approx(expected.teacher_logp, abs=1e-5)
    if name == "reverse_kl_full":
        total = count = 0.0
        for t in trajectories:
            for plain, advised in zip(before.samples(t), before.samples(t, SKILL), strict=True):
                p, q = (before.next_logp(*before.pad([s])).detach() for s in (plain, advised))
                total, count = total + float((p.exp() * (p - q)).sum()), count + len(p)
        assert row["loss_distill"] == pytest.approx(0.3 * total / count, rel=1e-4)


def test_hindsight_reads_the_whole_episode(policy, episodes):
    episode = max(episodes, key=lambda e: len(e.turns))
    asked = text(policy, policy.analysis_ids(episode))
    assert all(asked.count(turn.observation) >= 1 for turn in episode.turns) and HOW_TO_ANSWER not in asked
    pupil = windowed()
    rows = stage1(pupil, episodes[:2], [Skill("find it.")] * 2, Stage1Config(epochs=1, batch_size=2))
    assert rows[0]["loss"] > 0 and pupil.version != policy.version


def test_the_window_is_kept_and_chosen(policy, tmp_path):
    policy.save(tmp_path)
    assert load_policy(tmp_path).layout == policy.layout
    assert load_policy(tmp_path, window=5).layout.window == 5
    with pytest.raises(PolicyError, match="window must be at least 0, got -1"):
        load_policy(tmp_path, window=-1)
    with pytest.raises(PolicyError, match="fixes the layout: system cannot be chosen"):
        load_policy(tmp_path, system="Play.")
    (tmp_path / "layout.json").unlink()
    chosen = load_policy(tmp_path, system="Play.", window=3).layout
    assert chosen.window == 3 and "Play." in chosen.begin and SAID  # the template is the tokenizer's


def test_a_prompt_that_does_not_fit_is_an_error_that_names_it(policy, episodes):
    short = windowed()
    longest = max(len(s.ids) for s in short.samples(episodes[0]))
    short.max_length = longest - 1
    with pytest.raises(PolicyError, match=f"{longest} tokens, the model reads {longest - 1}"):
        rescore(short, episodes[:1], [None])
    short.max_length = longest
    with pytest.raises(PolicyError, match=r"tokens with the skill \(\d+ without\)"):
        rescore(short, episodes[:1], [SKILL])
