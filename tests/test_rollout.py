"""Rollouts: who says what depends on the trajectory's own seed, and what was sampled is what is kept."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch

from seedkit.envs import make
from seedkit.envs.household_games import household_task, sample_specs
from seedkit.envs.household_policy import make_policy
from seedkit.policy import Conversation
from seedkit.rollout import collect
from seedkit.types import Observation, Skill, Task

ADVICE = Skill("find it, take it, go to its place and move it there.", {1: "open it."}, author="library")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def policy():
    return talker()


def talker():
    """Untrained, but inclined to end its answers early, so that they differ in length."""
    tiny = make_policy(width=32, layers=1, heads=2, seed=3)
    with torch.no_grad():
        for weight in tiny.model.parameters():
            weight.mul_(4)
    return tiny


@pytest.fixture(scope="module")
def env():
    return make("household")


@pytest.fixture(scope="module")
def tasks():
    specs = sample_specs("valid_unseen", 4, 31, receptacles=(3, 5), distractors=(0, 2))
    return [household_task("valid_unseen", spec, []) for spec in specs]


class Script:
    """An environment that accepts anything, counts steps, and ends with success after `last` of them."""

    name = "script"
    engine_name = "none"
    max_steps = 99
    max_action_tokens = 12

    def __init__(self, last=3, length=1):
        self.last, self.length = last, length

    def panel(self, split):
        return [Task(f"s{n}", self.name, split, "count", {"n": n}) for n in range(4)]

    def clone(self):
        return Script(self.last, self.length)

    def close(self):
        self.closed = True

    def grammar(self, task):
        return "none"

    def names_workflow(self, task, skill):
        return False

    def reset(self, task):
        self.task, self.count, self.sent = task, 0, []
        return Observation("your task is to: look. " * self.length, tuple(self.words))

    def step(self, action):
        self.sent.append(action)
        self.count += 1
        done = self.count >= self.last
        return Observation(f"you arrive at desk {self.count}.", tuple(self.words), float(done) / 2, done, done)

    @property
    def words(self):
        return [f"desk {n}" for n in range(1, 9)]


class Sayer:
    """Stands in for a policy's sampling: says what the script says, one line a turn and row."""

    def __init__(self, monkeypatch, policy, lines):
        self.rows = rows_said = []

        class Talk:
            def __init__(self, policy, rows):
                self.turn = 0

            def say(self, contexts, rngs, max_new_tokens, temperature):
                rows_said.append(len(contexts))
                line = lines[min(self.turn, len(lines) - 1)]
                self.turn += 1
                ids = [*policy.encode(line), policy.end_id]
                return [ids for _ in contexts], [[-0.5] * len(ids) for _ in contexts]

            def keep(self, rows):
                pass

        monkeypatch.setattr("seedkit.policy.Conversation", Talk)


# --- seeds and batches ---------------------------------------------------------------------------------------------


def said(trajectories):
    return [[turn.response_ids for turn in t.turns] for t in trajectories]


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_batch_size_does_not_change_who_says_what(policy, env, tasks, temperature):
    options = {"group": 2, "max_steps": 4, "seed": 2, "temperature": temperature}
    whole = collect(policy, env, tasks, batch_size=64, **options)
    assert len({r for t in said(whole) for r in t}) > 20  # they do differ
    for size in (1, 3):
        other = collect(policy, env, tasks, batch_size=size, **options)
        assert said(other) == said(whole)
        for a, b in zip(whole, other, strict=True):
            assert b.behaviour_logp == pytest.approx(a.behaviour_logp, abs=5e-5)
            plain = [dataclasses.replace(t, behaviour_logp=()) for t in a.turns]
            assert [dataclasses.replace(t, behaviour_logp=()) for t in b.turns] == plain
            assert dataclasses.replace(b, turns=()) == dataclasses.replace(a, turns=())


def test_neither_do_other_tasks_and_their_order(policy, env, tasks):
    whole = {t.id: t for t in collect(policy, env, tasks, group=2, max_steps=3, seed=2)}
    other = collect(policy, env, tasks[::-1][:3], group=2, max_steps=3, seed=2)
    assert [t.task for t in other] == [t for t in tasks[::-1][:3] for _ in range(2)]
    for trajectory in other:
        assert said([trajectory]) == said([whole[trajectory.id]])


def test_seeds(policy, env, tasks):
    runs = [said(collect(policy, env, tasks[:2], group=2, max_steps=3, seed=seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert all(a != b for a, b in zip(runs[0], runs[2], strict=True))
    # nobody's chance depends on torch's or numpy's global state
    torch.manual_seed(123)
    assert said(collect(policy, env, tasks[:2], group=2, max_steps=3)) == runs[0]


def test_members_of_a_group_differ(policy, env, tasks):
    group = collect(policy, env, tasks[:1], group=6, max_steps=3)
    assert len({str(x) for x in said(group)}) == 6
    assert [t.id for t in group] == [f"{tasks[0].id}/0.{n}" for n in range(6)]


def test_several_calls_play_a_group(policy, env, tasks):
    whole = collect(policy, env, tasks[:2], group=3, max_steps=3)
    first = collect(policy, env, tasks[:1], group=2, max_steps=3)
    last = collect(policy, env, [tasks[0], *[tasks[1]] * 3], members=[2, 0, 1, 2], max_steps=3)
    assert said(first + last) == said(whole)
    assert [t.id for t in first + last] == [t.id for t in whole]
    with pytest.raises(ValueError, match="one member a task: 1 members for 2 tasks"):
        collect(policy, env, tasks[:2], members=[1])


def test_greedy_members_are_the_same(policy, env, tasks):
    group = collect(policy, env, tasks[:1], group=3, max_steps=2, temperature=0.0)
    assert len({str(x) for x in said(group)}) == 1
    assert all(p < 0 for t in group for p in t.behaviour_logp)  # at temperature 1, not 0 nats


# --- what is kept --------------------------------------------------------------------------------------------------


def test_a_trajectory_is_what_the_policy_saw_and_said(policy, env, tasks):
    for trajectory in collect(policy, env, tasks, max_steps=4, temperature=0.7, seed=5):
        assert trajectory.policy_version == policy.version
        assert (trajectory.seed, trajectory.skill) == (5, None)
        assert trajectory.protocol == {
            "temperature": 0.7,
            "max_steps": 4,
            "context": "transcript",
            "policy": policy.name,
            "max_new_tokens": 12,
            "grammar": "move",
        }
        assert trajectory.turns[0].observation == env.reset(trajectory.task).text
        for n, turn in enumerate(trajectory.turns):
            render = policy.turn_ids(turn.observation, n) if n else policy.open_ids(turn.observation)
            assert turn.context_ids == tuple(render)
            assert len(turn.response_ids) == len(turn.behaviour_logp) <= 12
            assert policy.end_id not in turn.response_ids[:-1]
            assert turn.valid == (turn.action in (turn.admissible or ())) == (turn.reason is None)
        after = [turn.observation for turn in trajectory.turns[1:]] + [trajectory.final_observation]
        for turn, text in zip(trajectory.turns, after, strict=True):
            assert turn.valid or text == "Nothing happens."
        assert trajectory.reward == sum(t.reward for t in trajectory.turns)


def test_actions_are_played_and_rewarded(policy, monkeypatch):
    Sayer(monkeypatch, policy, ["desk 1", "desk 2", "moon", "DESK 3"])
    env = Script(last=3)
    (trajectory,) = collect(policy, env, env.panel("x")[:1], max_steps=9)
    assert [(t.action, t.valid, t.reason, t.reward) for t in trajectory.turns] == [
        ("desk 1", True, None, 0.0),
        ("desk 2", True, None, 0.0),
        ("<unk>", False, "not admissible", 0.0),  # counted and not sent
        ("desk 3", True, None, 0.5),
    ]
    texts = [t.observation for t in trajectory.turns[1:]] + [trajectory.final_observation]
    assert texts == ["you arrive at desk 1.", "you arrive at desk 2.", "Nothing happens.", "you arrive at desk 3."]
    assert (trajectory.success, trajectory.truncated, trajectory.reward) == (True, False, 0.5)
    assert trajectory.behaviour_logp == (-0.5,) * len(trajectory.response_ids)
    assert trajectory.turns[3].admissible == trajectory.turns[0].admissible


def test_an_environment_may_read_free_text(policy, monkeypatch):
    """Any text is sent, the environment says what was wrong with it; what is no text at all is not sent."""
    Sayer(monkeypatch, policy, ["desk 1", "sofa 2", "desk", ""])

    class Free(Script):
        max_steps = 4
        max_action_tokens = 7

        def clone(self):
            return self

        def reset(self, task):
            return dataclasses.replace(super().reset(task), admissible=None)

        def step(self, action):
            if "desk" not in action:
                return Observation("Nothing happens.", None, reason="no desk in it")
            return dataclasses.replace(super().step(action), admissible=None)

    env = Free(last=9)
    (trajectory,) = collect(policy, env, env.panel("x")[:1])
    assert [(t.action, t.valid, t.reason) for t in trajectory.turns] == [
        ("desk 1", True, None),
        ("sofa 2", False, "no desk in it"),
        ("desk", True, None),
        ("", False, "empty"),
    ]
    assert [t.admissible for t in trajectory.turns] == [None] * 4
    assert env.sent == ["desk 1", "desk"]
    assert (trajectory.truncated, trajectory.final_observation) == (True, "Nothing happens.")
    assert (trajectory.protocol["max_steps"], trajectory.protocol["max_new_tokens"]) == (4, 7)


def test_no_admissible_action_is_cut(policy, env, tasks, monkeypatch):
    """An environment counts tokens as its own policy does; another tokenizer may need more for the same action."""
    limits = []
    say = Conversation.say

    def watched(self, contexts, rngs, max_new_tokens, temperature):
        limits.append(list(max_new_tokens))
        return say(self, contexts, rngs, max_new_tokens, temperature)

    monkeypatch.setattr(Conversation, "say", watched)
    monkeypatch.setattr(type(env), "max_action_tokens", 3)
    (free,) = collect(policy, env, tasks[:1], max_steps=5)
    longest = [max(len(policy.encode(a)) for a in turn.admissible or ()) + 1 for turn in free.turns]
    assert limits == [[n] for n in longest] and max(longest) > 3
    (cut,) = collect(policy, env, tasks[:1], max_steps=5, max_new_tokens=2)
    assert limits[5:] == [[2]] * 5 and max(len(turn.response_ids) for turn in cut.turns) == 2


def test_episodes_that_do_not_end_are_truncated(policy, monkeypatch):
    Sayer(monkeypatch, policy, ["desk 1"])
    env = Script(last=5)
    for steps, truncated in ((4, True), (5, False), (6, False)):
        (trajectory,) = collect(policy, env, env.panel("x")[:1], max_steps=steps)
        assert len(trajectory.turns) == min(steps, 5)
        assert (trajectory.truncated, trajectory.success) == (truncated, not truncated)


def test_a_full_context_truncates_its_episode_alone(monkeypatch):
    """An episode ends where the model could not read on; others go on, whatever the batch size."""
    policy = talker()
    Sayer(monkeypatch, policy, ["desk 1"])
    short, long = Script(last=8, length=1), Script(last=8, length=6)

    class Both(Script):
        def clone(self):
            return Both(8)

        def reset(self, task):
            self.length = (long if task.spec["n"] % 2 else short).length
            return super().reset(task)

    env = Both(8)
    tasks = env.panel("x")
    opening = [len(policy.open_ids(env.reset(task).text)) for task in tasks]
    turn = len(policy.turn_ids("you arrive at desk 1.", 1)) + 3  # with its answer "desk 1 <end>"
    policy.max_length = opening[0] + 3 + 7 * turn + 12  # room for the short ones only
    expected = [8 if n % 2 == 0 else None for n in range(4)]
    for size in (1, 3, 64):
        played = collect(policy, env, tasks, max_steps=20, batch_size=size, max_new_tokens=12)
        for trajectory, turns, start in zip(played, expected, opening, strict=True):
            length = sum(len(t.context_ids) + len(t.response_ids) for t in trajectory.turns)
            assert length <= policy.max_length
            if turns:
                assert (len(trajectory.turns), trajectory.truncated, trajectory.success) == (8, False, True)
            else:
                # the next request to act would no longer leave 12 tokens for the answer
                fits = 1 + (policy.max_length - 12 - start - 3 + 3) // turn
                assert (len(trajectory.turns), trajectory.truncated, trajectory.success) == (fits, True, False)
                assert trajectory.final_observation == f"you arrive at desk {fits}."


def test_rows_that_leave_early_do_not_disturb_the_others(env, tasks):
    """The longest openings fill the context first; the cache must go on with the right rows."""
    policy = talker()
    openings = sorted(len(policy.open_ids(env.reset(task).text)) for task in tasks)
    policy.max_length = openings[-1] + 40
    whole = collect(policy, env, tasks, group=2, max_steps=6)
    assert len({len(t.turns) for t in whole}) > 1
    for size in (1, 3):
        assert said(collect(policy, env, tasks, group=2, max_steps=6, batch_size=size)) == said(whole)


def test_a_task_that_does_not_fit_at_all(env, tasks):
    policy = talker()
    policy.max_length = 20
    for trajectory in collect(policy, env, tasks[:2]):
        assert (trajectory.turns, trajectory.truncated, trajectory.success) == ((), True, False)
        assert trajectory.final_observation == env.reset(trajectory.task).text


def test_finished_rows_are_dropped(policy, monkeypatch):
    """Later turns are sampled for the open episodes only."""
    rows = Sayer(monkeypatch, policy, ["desk 1"]).rows

    class Staggered(Script):
        def clone(self):
            return Staggered()

        def reset(self, task):
            self.last = 1 + task.spec["n"]
            return super().reset(task)

    env = Staggered()
    played = collect(policy, env, env.panel("x"), max_steps=9)
    assert [len(t.turns) for t in played] == [1, 2, 3, 4]
    assert rows == [4, 3, 2, 1]


def test_the_cache_goes_with_the_rollout(policy, env, tasks, monkeypatch):
    """And not with a later garbage collection: a language model's is most of a gigabyte."""
    talks = []

    def converse(self, rows):
        talk = Conversation(self, rows)
        talks.append(weakref.ref(talk))
        return talk

    monkeypatch.setattr(type(policy), "converse", converse)
    gc.disable()
    try:
        collect(policy, env, tasks, max_steps=2)
        alive = [talk() for talk in talks]
    finally:
        gc.enable()
    assert alive == [None]


def test_results_stand_task_by_task(policy, env, tasks):
    played = collect(policy, env, tasks, group=2, max_steps=1, batch_size=3)
    assert [t.task for t in played] == list(itertools.chain.from_iterable([t, t] for t in tasks))
    assert collect(policy, env, []) == []


# --- a skill in the student's prompt -------------------------------------------------------------------------------


def test_a_prompted_skill_stands_in_the_context(policy, env, tasks):
    skills = [ADVICE, None, ADVICE, None]
    played = collect(policy, env, tasks, group=2, max_steps=3, skills=skills)
    assert [t.skill for t in played] == [s for s in skills for _ in range(2)]
    for trajectory in played:
        for n, turn in enumerate(trajectory.turns):
            skill = trajectory.skill
            render = policy.turn_ids(turn.observation, n, skill) if n else policy.open_ids(turn.observation, skill)
            assert turn.context_ids == tuple(render)
    bare = collect(policy, env, tasks, group=2, max_steps=3)
    assert said(played[2:4]) == said(bare[2:4])
    assert said(played[:2]) != said(bare[:2])
    assert collect(policy, env, tasks, group=2, max_steps=3, skills=[None] * 4) == bare


def test_one_skill_a_task(policy, env, tasks):
    with pytest.raises(ValueError, match="one skill a task: 3 skills for 4 tasks"):
        collect(policy, env, tasks, skills=[None] * 3)


@pytest.mark.parametrize(
    "options",
    [{"max_steps": 0}, {"group": 0}, {"batch_size": 0}, {"temperature": -1.0}, {"max_new_tokens": 0}],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(policy, env, tasks, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        collect(policy, env, tasks[:1], **{"max_steps": 1, **options})
