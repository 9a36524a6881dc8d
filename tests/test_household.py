"""ALFWorld through the fast engine: the stock engine's text, reproducible games, disjoint panels, clear errors."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

from seedkit.envs import (
    EnvError,
    Household,
    household,
    household_engine,
    household_games,
    make,
    panel_hash,
    spread,
)
from seedkit.envs.base import data_dir, write_panel
from seedkit.envs.household_engine import FastPddlEnv, NamedPddlEnv, make_engine
from seedkit.envs.household_expert import Expert
from seedkit.envs.household_games import (
    ALFRED_TYPE,
    KINDS,
    SpecError,
    build_game,
    check_spec,
    floor_plan,
    household_task,
    room_of,
    sample_specs,
)
from seedkit.types import Task

ROOT = Path(__file__).resolve().parents[1]
SPLITS = ("train", "valid_seen", "valid_unseen")
RARE = ("clean", "heat", "cool", "use", "take", "open", "close")
PANEL_STEPS, SMALL_STEPS = 27, 90  # a kind and split: (27 + 90) * 6 kinds * 3 splits = 2,106 steps


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Games are built by the code under test, not found in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def panels():
    env = make("household")
    return {split: env.panel(split) for split in SPLITS}


@pytest.fixture(scope="module")
def env():
    return make("household")


@functools.cache
def made_specs(count):
    return sample_specs("valid_unseen", count, 7)


def made_task():
    return household_task("train", made_specs(1)[0], [])


def one_of_each_kind(tasks):
    """The smallest game of each kind: what the stock engine plays fastest."""
    size = lambda task: (task.spec["receptacles"] + task.spec["distractors"], task.id)  # noqa: E731
    return [min((t for t in tasks if t.kind == kind), key=size) for kind in KINDS]


def small_tasks(split):
    specs = sample_specs(split, len(KINDS), 11, receptacles=(3, 3), distractors=(0, 1), closed=0.6)
    return [household_task(split, spec, []) for spec in specs]


def plan_of(task):
    return task.spec["walkthrough"]


# --- the fast engine is the stock engine ---------------------------------------------------------------------------


def odd_command(observation, rng):
    """Something that no state, or only another state, accepts."""
    known = rng.choice(observation.admissible)
    wrong = ["", "go to moon 1", "take sun 1 from sky 2", known.upper(), known + " please", "move", "heat cool clean"]
    return rng.choice([*wrong, known.replace("go to", "open"), "take knife 1 from countertop 1", f"  {known}\n"])


def play_both(fast, stock, task, steps, rng, seen):
    """Plays a task on both engines for so many steps, starting again when it is done, and compares everything."""
    left = steps
    while left:
        now = fast.reset(task)
        assert now == stock.reset(task)
        expert = Expert(now, task.kind, rng, noise=0.1)
        while left and not now.done:
            draw = rng.random()
            command = expert.act(now)  # always asked, so that it knows what was seen
            if draw < 0.2:
                command = rng.choice(now.admissible)
            elif draw < 0.4:
                rare = [a for a in now.admissible if a.startswith(RARE)]  # also where the task does not ask for it
                command = rng.choice(rare or now.admissible)
            elif draw < 0.5:
                command = odd_command(now, rng)
            kind = command.split()[0] if command.strip() in now.admissible else "inadmissible"
            now = fast.step(command)
            # feedback, admissible commands in order, reward, done and success: equal, or the test fails
            assert now == stock.step(command), (task.id, command)
            seen[kind] += 1
            left -= 1
        seen["finished"] += now.done
    return seen


@pytest.mark.parametrize("split", SPLITS)
def test_parity_with_the_stock_engine(split, panels):
    fast, stock = make("household"), make("household", engine="stock")
    rng = random.Random(f"parity {split}")
    seen = Counter()
    for task in one_of_each_kind(panels[split]):
        play_both(fast, stock, task, PANEL_STEPS, rng, seen)
    for task in small_tasks(split):
        play_both(fast, stock, task, SMALL_STEPS, rng, seen)
    assert isinstance(fast._engine, FastPddlEnv)
    assert type(stock._engine) is NamedPddlEnv
    assert sum(seen.values()) - seen["finished"] == (PANEL_STEPS + SMALL_STEPS) * len(KINDS) >= 2000 / 3
    assert seen["finished"] >= 4
    assert seen["inadmissible"] >= 40
    for verb in (
        "go",
        "take",
        "move",
        "open",
        "close",
        "heat",
        "cool",
        "clean",
        "use",
        "examine",
        "inventory",
        "look",
    ):
        assert seen[verb], f"no {verb!r} among the steps"


def test_engines_agree_after_the_end(env):
    task = made_task()
    stock = make("household", engine="stock")
    for player in (env, stock):
        now, rng = player.reset(task), random.Random(0)
        expert = Expert(now, task.kind, rng)
        while not now.done:
            now = player.step(expert.act(now))
        assert (now.reward, now.success) == (1.0, True)
        with pytest.raises(EnvError, match=r"the episode is over .*reset\(task\)"):
            player.step("look")


def test_members_of_a_group_see_what_a_lone_player_sees(env, panels):
    """Clones share transitions; where they part and interleave, nobody's engine may lag behind its player."""
    rng = random.Random(5)
    for task in one_of_each_kind(panels["train"])[2:5]:
        group = [env.clone() for _ in range(3)]
        alone = [make("household") for _ in group]
        nows = [player.reset(task) for player in group]
        assert nows == [player.reset(task) for player in alone]
        for _ in range(120):
            n = rng.randrange(3)
            if nows[n].done or rng.random() < 0.03:
                nows[n] = group[n].reset(task)
                assert nows[n] == alone[n].reset(task)
            # few commands at first, so that paths meet before they part
            command = rng.choice(nows[n].admissible[: rng.choice((2, 4, 99))])
            nows[n] = group[n].step(command)
            assert nows[n] == alone[n].step(command)


def test_players_keep_their_place_when_shared_transitions_are_forgotten(env, panels, monkeypatch):
    monkeypatch.setattr(household, "_MOST_NODES", 15)
    rng = random.Random(6)
    tasks = one_of_each_kind(panels["valid_seen"])[:2]
    shared = make("household")
    group, alone = [shared.clone() for _ in range(3)], [make("household") for _ in range(3)]
    at = [tasks[n % 2] for n in range(3)]
    nows = [player.reset(task) for player, task in zip(group, at, strict=True)]
    for player, task in zip(alone, at, strict=True):
        player.reset(task)
    for _ in range(150):
        n = rng.randrange(3)
        if nows[n].done or rng.random() < 0.05:
            at[n] = rng.choice(tasks)
            nows[n] = group[n].reset(at[n])
            assert nows[n] == alone[n].reset(at[n])
        command = rng.choice(nows[n].admissible or ())
        nows[n] = group[n].step(command)
        assert nows[n] == alone[n].step(command)
    assert sum(size(root) for _, root in shared._games.roots.values()) <= 15


def size(node):
    return 1 + sum(map(size, node.children.values()))


def test_a_known_transition_costs_no_engine_step(panels, monkeypatch):
    task = panels["train"][0]
    env = make("household")
    now = env.reset(task)
    for command in plan_of(task):
        now = env.step(command)
    clone = env.clone()
    monkeypatch.setattr(FastPddlEnv, "step", lambda *_: pytest.fail("derived again"))
    monkeypatch.setattr(FastPddlEnv, "load", lambda *_: pytest.fail("loaded again"))
    clone.reset(task)
    for command in plan_of(task):
        again = clone.step(command)
    assert again == now
    assert now.success


# --- the library stays as it is ------------------------------------------------------------------------------------

NOT_PATCHED = """
import json, sys
import alfworld.agents.utils.misc, fast_downward, textworld.envs.pddl.pddl, textworld.generator.game
from textworld import EnvInfos
from textworld.envs.pddl.pddl import PddlEnv

def snapshot():
    held = {}
    for module in [m for m in list(sys.modules) if m.split(".")[0] in ("textworld", "fast_downward", "alfworld")]:
        for name, value in list(vars(sys.modules[module]).items()):
            if callable(value):
                held[module, name] = value
                if isinstance(value, type):
                    held |= {(module, name, k): v for k, v in vars(value).items() if callable(v) or k[0] != "_"}
    return held

def stock():
    sys.argv = ["mine", "--flag"]
    env = PddlEnv(EnvInfos(won=True, admissible_commands=True))
    env.load(sys.argv[1:] and FILE)
    told = [env.reset()["feedback"]]
    for n in (0, 3, 5):
        state, score, done = env.step(env.state["admissible_commands"][n])
        told += [state["feedback"], state["admissible_commands"], score, done]
    return told, sys.argv

FILE, TASK = sys.argv[1], json.loads(sys.argv[2])
before = stock()
held = snapshot()
from seedkit.envs import make
from seedkit.types import Task
env = make("household")
now = env.reset(Task(**TASK))
for _ in range(4):
    now = env.step(now.admissible[0])
after = snapshot()
known = {key[0] for key in held}
changed = [key for key in {**held, **after} if key[0] in known and after.get(key) is not held.get(key)]
print(json.dumps({"changed": changed, "held": len(held), "same": stock() == before, "argv": before[1],
                  "text": before[0][0]}))
"""


def run_python(code, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_textworld_is_not_patched(env, panels):
    task = panels["train"][0]
    told = json.loads(run_python(NOT_PATCHED, str(env.game_file(task)), json.dumps(dataclasses.asdict(task))))
    assert told["held"] > 500
    assert told["changed"] == []
    assert told["same"]
    assert told["argv"] != ["mine", "--flag"]  # stock TextWorld lets the planner overwrite it; ours does not
    assert "_bar_" in told["text"]  # nor does a stock engine know our names


def test_arguments_survive_loading(panels, monkeypatch):
    arguments = ["seedkit", "train", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    for engine in ("fast", "stock"):
        make("household", engine=engine).reset(panels["train"][1])
        assert sys.argv is arguments
        assert arguments == ["seedkit", "train", "--steps", "3"]


def test_unchecked_textworld_falls_back_with_one_warning(env, monkeypatch):
    task = made_task()
    expected = env.reset(task)
    monkeypatch.setattr(household_engine, "textworld_version", "99.0")
    monkeypatch.setattr(household_engine, "_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        player = make("household")
        assert player.reset(task) == expected
        assert player.step("look") == env.step("look")
        assert [type(make_engine()) for _ in range(2)] == [NamedPddlEnv] * 2
    assert type(player._engine) is NamedPddlEnv
    told = [str(w.message) for w in caught if "textworld" in str(w.message)]
    assert len(told) == 1
    assert "99.0" in told[0]
    assert "\n" not in told[0]


# --- games ---------------------------------------------------------------------------------------------------------

REBUILD = """
import hashlib, json, sys
from seedkit.envs import make
from seedkit.envs.household_games import build_game, household_task
specs = json.loads(sys.argv[1])
games = [hashlib.sha256(json.dumps(build_game(spec)).encode()).hexdigest() for spec in specs]
env, told = make("household"), []
for spec in specs[:2]:
    now = env.reset(household_task("train", spec, []))
    for n in range(8):
        told.append([now.text, now.admissible])
        now = env.step(now.admissible[n % len(now.admissible)])
print(json.dumps([games, hashlib.sha256(json.dumps(told).encode()).hexdigest()]))
"""


def test_same_spec_same_game_in_another_process(env, tmp_path):
    specs = sample_specs("train", 12, 3)
    told = []
    for spec in specs[:2]:
        now = env.reset(household_task("train", spec, []))
        for n in range(8):
            told.append([now.text, now.admissible])
            now = env.step(now.admissible[n % len(now.admissible)])
    here = [hashlib.sha256(json.dumps(build_game(spec)).encode()).hexdigest() for spec in specs]
    played = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = run_python(REBUILD, json.dumps(specs), PYTHONHASHSEED=other, SEEDKIT_CACHE=str(tmp_path))
    assert json.loads(there) == [here, played]


@pytest.mark.parametrize("part", ["domain", "grammar", "builder"])
def test_an_old_cache_is_not_played(part, monkeypatch):
    """Whatever writes the game changes its file's name, not only its spec."""
    task = made_task()
    before = make("household").game_file(task)
    if part == "builder":
        problem = household_games.build_problem
        monkeypatch.setattr(household_games, "build_problem", lambda spec: (problem(spec)[0] + ";", "put it there."))
    else:
        known = dict(household_games.facts())
        monkeypatch.setattr(household_games, "facts", lambda: {**known, part: known[part] + "\n"})
    after = make("household").game_file(task)
    assert after != before
    assert before.read_bytes() != after.read_bytes()
    monkeypatch.undo()


def test_sampling_specs_is_seeded_and_balanced():
    specs = sample_specs("valid_unseen", 24, 5)
    assert specs[:6] == sample_specs("valid_unseen", 6, 5)
    assert specs[:6] != sample_specs("valid_unseen", 6, 6)
    assert Counter(spec["kind"] for spec in specs) == dict.fromkeys(KINDS, 4)
    assert {room_of(spec["plan"]) for spec in specs} == {"kitchen", "livingroom", "bedroom", "bathroom"}
    for spec in specs:
        assert check_spec(spec) is spec


def test_games_use_no_more_than_the_floor_plan_has():
    for spec in sample_specs("valid_unseen", 12, 8):
        declared = re.findall(r"\(receptacleType ([A-Z]\S+) (\w+)Type\)", build_game(spec)["pddl_problem"])
        counts, _ = floor_plan(spec["plan"])
        assert Counter(kind for _, kind in declared) <= counts
        assert len({name for name, _ in declared}) == len(declared) <= spec["receptacles"]


def test_difficulty_is_a_parameter():
    """More receptacles and distractors make a bigger game; `closed` decides where the goal object starts."""
    easy, hard = ((3, 3), (0, 0)), ((9, 9), (8, 8))
    sizes = []
    for receptacles, distractors in (easy, hard):
        specs = sample_specs("valid_unseen", 6, 2, receptacles=receptacles, distractors=distractors)
        sizes.append(sum(len(build_game(spec)["pddl_problem"]) for spec in specs))
    assert sizes[1] > 2 * sizes[0]
    shut = []
    for closed in (0.0, 1.0):
        specs = [{**spec, "closed": closed} for spec in sample_specs("valid_unseen", 24, 5)]
        shut.append(sum(starts_shut(spec) for spec in specs))
    assert shut[0] <= 3  # where every home of the object has a door
    assert shut[1] >= 15


def starts_shut(spec):
    problem = build_game(spec)["pddl_problem"]
    inside = re.search(rf"\(inReceptacle {spec['object']}_bar_01 (\S+)\)", problem)
    assert inside is not None
    return f"(openable {inside.group(1)})" in problem


def test_text_reads_naturally(env, panels):
    thing = r"[a-z]+ [1-9]\d?"
    command = re.compile(
        rf"look|inventory|help|(go to|open|close|use|examine) {thing}"
        rf"|take {thing} from {thing}|move {thing} to {thing}|(clean|heat|cool) {thing} with {thing}"
    )
    names = set()
    for task in itertools.chain.from_iterable(spread(panels[split], 6) for split in SPLITS):
        now = env.reset(task)
        assert now.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
        assert re.fullmatch(r"Your task is to: [a-z ]+\.", now.text.splitlines()[-1]), now.text
        for step in plan_of(task)[:4]:
            assert not re.search(r"basinbasin|_|\b(bar|loc|agent1?)\b|\{|\}|#", now.text, re.IGNORECASE), now.text
            assert [a for a in now.admissible if not command.fullmatch(a)] == []
            names |= set(re.findall(r"\b([a-z]+) \d", now.text))
            now = env.step(step)
    assert {"sinkbasin", "drawer", "microwave", "fridge"} <= names
    assert not [n for n in names if re.search(r"^(sink|bathtub)$|basinbasin", n)]


# --- panels --------------------------------------------------------------------------------------------------------


def games_of(tasks):
    return {build_key(t.spec) for t in tasks}


def build_key(spec):
    return json.dumps({k: v for k, v in spec.items() if k != "walkthrough"}, sort_keys=True)


def goals_of(tasks):
    return {(t.kind, t.spec["object"], t.spec["target"]) for t in tasks}


def test_panels_are_disjoint(panels):
    train, seen, unseen = (panels[split] for split in SPLITS)
    assert not games_of(train) & games_of(seen)
    known = train + seen
    assert not {t.spec["plan"] for t in known} & {t.spec["plan"] for t in unseen}
    assert not goals_of(known) & goals_of(unseen)
    assert not {t.id for t in known} & {t.id for t in unseen}


@pytest.mark.parametrize("split", SPLITS)
def test_panels_are_sorted_hashed_and_balanced(split, panels):
    tasks = panels[split]
    lines = (data_dir() / "household" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    assert [t.id for t in tasks] == sorted(t.id for t in tasks) == [json.loads(line)["id"] for line in lines[1:]]
    assert header == {"split": split, "count": len(tasks), "hash": panel_hash(tasks)}
    assert {(t.env, t.split) for t in tasks} == {("household", split)}
    assert len(games_of(tasks)) == len(tasks)
    counts = Counter(t.kind for t in tasks)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 2
    for task in tasks:
        check_spec(task.spec)
        assert task.id == household_task(split, {k: v for k, v in task.spec.items() if k != "walkthrough"}, []).id
        assert task.kind == task.spec["kind"]


@pytest.mark.parametrize("split", SPLITS)
def test_stored_walkthroughs_solve_their_games(split, env, panels):
    for task in spread(panels[split], 18):
        now = env.reset(task)
        assert not now.done
        plan = plan_of(task)
        assert 2 <= len(plan) <= Household.max_steps
        for command in plan:
            assert (now.done, now.reward) == (False, 0.0)
            assert command in now.admissible
            now = env.step(command)
        assert (now.done, now.success, now.reward) == (True, True, 1.0), task.id


def test_panel_hash_ignores_order_only(panels):
    tasks = panels["valid_seen"][:6]
    assert panel_hash(tasks) == panel_hash(tasks[::-1])
    assert panel_hash(tasks) != panel_hash(tasks[1:])
    for change in ({"id": "x"}, {"kind": "x"}, {"env": "x"}, {"spec": {**tasks[0].spec, "seed": 1}}):
        assert panel_hash([dataclasses.replace(tasks[0], **change), *tasks[1:]]) != panel_hash(tasks)


def test_a_part_of_a_panel_keeps_its_mix(panels):
    tasks = panels["valid_unseen"]
    part = spread(tasks, 12)
    assert Counter(t.kind for t in part) == dict.fromkeys(KINDS, 2)
    assert part == spread(tasks[::-1], 12)
    assert part[:6] == spread(tasks, 6)
    assert spread([], 4) == []


def made_panel(folder):
    """A panel of three made tasks in its own data folder; returns its path and lines."""
    path = folder / "household" / "train.jsonl"
    write_panel(path, "train", [household_task("train", spec, ["look"]) for spec in made_specs(3)])
    return path, path.read_text(encoding="utf-8").splitlines(keepends=True)


def edit(line, **changes):
    row = {k: v for k, v in {**json.loads(line), **changes}.items() if v != "gone"}
    return json.dumps(row) + "\n"


PANEL_FAULTS = {
    "empty file": (lambda h, r: "", "line 1.*header"),
    "no header": (lambda h, r: "".join(r), "line 1.*header"),
    "header without split": (lambda h, r: edit(h, split="gone") + "".join(r), "line 1.*split"),
    "header without count": (lambda h, r: edit(h, count="gone") + "".join(r), "line 1.*count"),
    "header without hash": (lambda h, r: edit(h, hash="gone") + "".join(r), "line 1.*hash"),
    "header's count is text": (lambda h, r: edit(h, count="3") + "".join(r), "header promises"),
    "header's hash is null": (lambda h, r: edit(h, hash=None) + "".join(r), "hash None"),
    "header of another split": (lambda h, r: edit(h, split="valid_unseen") + "".join(r), "split"),
    "header's split is a number": (lambda h, r: edit(h, split=3) + "".join(r), "split"),
    "a line is missing": (lambda h, r: h + "".join(r[1:]), "promises 3 tasks, the file holds 2"),
    "torn last line": (lambda h, r: (h + "".join(r))[:-30], "line 4: not JSON"),
    "blank line": (lambda h, r: h + "\n" + "".join(r), "line 2: not JSON"),
    "an array": (lambda h, r: h + "[]\n" + "".join(r[1:]), "line 2: expected an object, got list"),
    "task without id": (lambda h, r: h + edit(r[0], id="gone") + "".join(r[1:]), "line 2: field 'id'"),
    "task without kind": (lambda h, r: h + r[0] + edit(r[1], kind="gone") + r[2], "line 3: field 'kind'"),
    "id is a number": (lambda h, r: h + edit(r[0], id=3) + "".join(r[1:]), "line 2: field 'id' must be a str"),
    "spec is null": (lambda h, r: h + edit(r[0], spec=None) + "".join(r[1:]), "line 2: field 'spec' must be a dict"),
    "spec was edited": (lambda h, r: h + edit(r[0], spec={"plan": 1}) + "".join(r[1:]), "do not match .* hash"),
    "kind was edited": (lambda h, r: h + edit(r[0], kind="look") + "".join(r[1:]), "do not match .* hash"),
    "a task twice": (lambda h, r: h + r[0] + r[0] + r[1], "twice"),
    "two panels in one": (lambda h, r: h + h + "".join(r[1:]), "line 2: field 'id'"),
    "not UTF-8": (lambda h, r: b"\xff\xfe" + h.encode(), "train.jsonl"),
}


@pytest.mark.parametrize("fault", PANEL_FAULTS)
def test_malformed_panels(fault, env, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_DATA", str(tmp_path))
    path, (header, *rows) = made_panel(tmp_path)
    assert len(env.panel("train")) == 3  # it is the change that makes it fail
    text, message = PANEL_FAULTS[fault]
    broken = text(header, rows)
    path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    with pytest.raises(EnvError, match=message) as caught:
        env.panel("train")
    one_line(caught)


def test_a_panel_in_any_order_reads_the_same(env, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_DATA", str(tmp_path))
    path, (header, *rows) = made_panel(tmp_path)
    tasks = env.panel("train")
    path.write_text(header + "".join(rows[::-1]), encoding="utf-8")
    assert env.panel("train") == tasks


def test_missing_panels(env, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_DATA", str(tmp_path))
    with pytest.raises(EnvError, match="train.jsonl: no such panel file"):
        env.panel("train")
    with pytest.raises(EnvError, match="no split 'test'; there are train, valid_seen, valid_unseen"):
        env.panel("test")


# --- malformed tasks -----------------------------------------------------------------------------------------------


def one_line(caught):
    text = str(caught.value)
    assert text
    assert "\n" not in text
    assert len(text) < 400


FIELDS = ("plan", "kind", "object", "target", "seed", "receptacles", "distractors", "closed")
NUMBERS = ("plan", "seed", "receptacles", "distractors")
BAD_SPECS = (
    [(f"no {name}", {name: "gone"}, name) for name in FIELDS]
    + [
        (f"{name} is {value!r}", {name: value}, name)
        for name, value in zip(NUMBERS, (-1, "7", 1.5, None), strict=True)
    ]
    + [(f"{name} is true", {name: True}, name) for name in NUMBERS]
    + [(f"closed is {value!r}", {"closed": value}, "closed") for value in (-0.1, 1.5, "often", None, True)]
    + [("closed is NaN", {"closed": float("nan")}, "closed")]
    + [(f"kind is {value!r}", {"kind": value}, "kind") for value in ("slice", "Clean", None, ["clean"])]
    + [(f"no floor plan {value}", {"plan": value}, f"floor plan {value}") for value in (0, 31, 200, 431, 999)]
    + [(f"object is {value!r}", {"object": value}, "cannot host") for value in ("Unicorn", "", None, 3, ["Mug"])]
    + [(f"target is {value!r}", {"target": value}, "cannot host") for value in ("Moon", None, {"a": 1})]
    + [("a spec that cannot be", {"kind": "heat", "object": "Sofa"}, "cannot host the goal heat 'Sofa'")]
    + [("a bed in the kitchen", {"target": "Bed"}, "cannot host")]
    + [(f"{value} distractors", {"distractors": value}, "'distractors' must be at most") for value in (300, 10**9)]
)


@pytest.mark.parametrize(("changes", "named"), [case[1:] for case in BAD_SPECS], ids=[case[0] for case in BAD_SPECS])
def test_malformed_specs(changes, named, env):
    good = made_specs(1)[0]
    spec = {k: v for k, v in {**good, **changes}.items() if v != "gone"}
    with pytest.raises(SpecError, match=named) as caught:
        check_spec(spec)
    one_line(caught)
    with pytest.raises(EnvError, match=rf"task 'bad'.*{named}") as caught:
        env.reset(Task("bad", "household", "train", "pick", spec))
    one_line(caught)
    assert env.reset(made_task()).admissible  # the player can go on


@pytest.mark.parametrize("value", [None, [], "spec", 3], ids=repr)
def test_a_spec_is_an_object(value):
    with pytest.raises(SpecError, match="a game spec is an object with plan, kind, object, target, seed"):
        check_spec(value)


def test_malformed_tasks(env):
    task = made_task()
    with pytest.raises(EnvError, match="belongs to 'search', not to 'household'"):
        env.reset(dataclasses.replace(task, env="search"))
    with pytest.raises(EnvError, match="task 'x': game spec lacks the field 'plan'"):
        env.reset(Task("x", "household", "train", "pick"))


@pytest.mark.parametrize("value", [{1}, b"x", {"a": 1, 2: 3}, "\ud800"], ids=repr)
def test_a_spec_that_is_no_json_names_its_task(value, env):
    task = made_task()
    bad = dataclasses.replace(task, id="odd", spec={**task.spec, "note": value})
    for use in (env.reset, env.game_file, env.grammar):
        with pytest.raises(EnvError, match="task 'odd': its spec cannot be written as JSON") as caught:
            use(bad)
        one_line(caught)


@pytest.mark.parametrize("value", [3, None, ["x"]], ids=repr)
def test_an_official_tasks_file_is_a_path(value, env):
    with pytest.raises(EnvError, match="task 'odd': 'file' must be a path") as caught:
        env.reset(Task("odd", "household", "official/train", "pick", {"file": value}))
    one_line(caught)


def test_a_floor_plan_can_be_filled():
    """As many distractors as the spec may ask for: drawn one by one, at most three of a type, and then it ends."""
    spec = made_specs(1)[0]
    with pytest.raises(SpecError) as caught:
        check_spec({**spec, "distractors": 10**9})
    most = int(re.findall(r"at most (\d+)", str(caught.value))[0])
    problem = build_game({**spec, "distractors": most})["pddl_problem"]
    kinds = Counter(re.findall(r"\(objectType \S+ (\w+)Type\)", problem))
    assert max(kinds.values()) <= 3
    assert spec["distractors"] < sum(kinds.values()) <= most + 2  # and the goal's own objects


def test_a_task_is_of_its_games_kind(env):
    """The kind chooses the skill and counts the results: one that differs from the game's would do so silently."""
    task = made_task()
    with pytest.raises(EnvError, match="kind"):
        env.reset(dataclasses.replace(task, kind="look"))


@pytest.mark.parametrize("value", ["look", 3, [1]], ids=repr)
def test_a_walkthrough_is_a_list_of_commands(value, env):
    task = made_task()
    with pytest.raises(EnvError, match="walkthrough") as caught:
        env.reset(dataclasses.replace(task, spec={**task.spec, "walkthrough": value}))
    one_line(caught)


def test_a_failed_reset_leaves_no_episode():
    player = make("household")
    with pytest.raises(EnvError, match="lacks the field"):
        player.reset(Task("x", "household", "train", "pick"))
    with pytest.raises(EnvError, match=r"call reset\(task\)"):
        player.step("look")


def test_a_closed_player_lends_its_engine_on(panels, monkeypatch):
    """Closed players hold no engine; the next one plays on with it, another game if need be."""
    made = []
    monkeypatch.setattr(household, "make_engine", lambda fast: made.append(make_engine(fast)) or made[-1])
    first, second = panels["train"][0], panels["valid_seen"][0]
    shared = make("household")
    for task in (first, second, first):
        player, alone = shared.clone(), make("household")
        count = len(made)
        now, other = player.reset(task), alone.reset(task)
        for command in plan_of(task)[: 3 if task is first else 99]:
            assert now == other
            now, other = player.step(command), alone.step(command)
        player.close()
        with pytest.raises(EnvError, match=r"call reset\(task\)"):
            player.step("look")
        del alone
    assert len(made) - count <= 1  # the lone player's; the shared one had none made any more
    assert player.reset(second).admissible


def test_wrong_use_is_told():
    with pytest.raises(EnvError, match="engine must be 'fast' or 'stock', got 'turbo'"):
        make("household", engine="turbo")
    with pytest.raises(EnvError, match="no environment named 'chess'; there are household, search, webshop"):
        make("chess")
    with pytest.raises(EnvError, match=r"never began.*reset\(task\)"):
        make("household").step("look")


# --- the official games --------------------------------------------------------------------------------------------

OLD_GRAMMAR = (
    ('"move {o} to {r}"', '"put {o} in/on {r}"'),
    ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."),
)


def put_words(text):
    return re.sub(r"^move (.*) to (.*)$", r"put \1 in/on \2", text)


@pytest.fixture
def official(tmp_path, env, panels, monkeypatch):
    """A little json_2.1.1 made of generated games, `put` grammar in valid_seen; returns its root and tasks."""
    root = tmp_path / "json_2.1.1"
    monkeypatch.setenv("SEEDKIT_ALFWORLD_DATA", str(tmp_path))
    used = {}
    for split, kinds in (("valid_seen", ("clean", "pick", "look")), ("valid_unseen", ("heat",))):
        for kind in kinds:
            task = next(t for t in panels["train"] if t.kind == kind)
            game = json.loads(env.game_file(task).read_text(encoding="utf-8"))
            plan = plan_of(task)
            if split == "valid_seen":
                for new, old in OLD_GRAMMAR:
                    assert new in game["grammar"]
                    game["grammar"] = game["grammar"].replace(new, old)
                plan = [put_words(command) for command in plan]
            goal = f"{ALFRED_TYPE[kind]}-{task.spec['object']}-None-{task.spec['target']}-{task.spec['plan']}"
            put_game(root, split, goal, {**game, "walkthrough": plan, "solvable": True})
            used[split, kind] = task
    # none of these counts: unsolvable, movable receptacle, sliced object, not a task type
    put_game(root, "valid_seen", "pick_and_place_simple-Mug-None-Shelf-1", {**game, "solvable": False})
    put_game(root, "valid_seen", "pick_and_place_with_movable_recep-Pen-Mug-Desk-1", {**game, "solvable": True})
    put_game(root, "valid_seen", "pick_and_place_simple-AppleSliced-None-Shelf-1", {**game, "solvable": True})
    put_game(root, "valid_seen", "make_tea-Kettle-None-Shelf-1", {**game, "solvable": True})
    return root, used


def put_game(root, split, goal, game, trial="trial_T20190907_1"):
    folder = root / split / goal / trial
    folder.mkdir(parents=True)
    (folder / "traj_data.json").write_text("{}", encoding="utf-8")
    (folder / "game.tw-pddl").write_text(json.dumps(game), encoding="utf-8")


def test_official_games_load_and_play(env, official):
    root, used = official
    tasks = env.panel("official/valid_seen")
    assert [t.id for t in tasks] == sorted(t.id for t in tasks)
    assert sorted(t.kind for t in tasks) == ["clean", "look", "pick"]
    assert {(t.env, t.split) for t in tasks} == {("household", "official/valid_seen")}
    for task in [*tasks, *env.panel("official/valid_unseen")]:
        path = env.game_file(task)
        assert path == root / task.spec["file"]
        old = task.split == "official/valid_seen"
        assert env.grammar(task) == ("put" if old else "move")
        now = env.reset(task)
        for command in json.loads(path.read_text(encoding="utf-8"))["walkthrough"]:
            assert command in now.admissible
            now = env.step(command)
        assert now.success
        made = used[task.split.removeprefix("official/"), task.kind]
        assert env.reset(task) == env.reset(made)
        assert env.grammar(made) == "move"


def test_the_old_grammar_plays_like_stock(env, official):
    task = next(t for t in env.panel("official/valid_seen") if t.kind == "pick")
    plan = json.loads(env.game_file(task).read_text(encoding="utf-8"))["walkthrough"]
    assert plan[-1].startswith("put ")
    stock = make("household", engine="stock")
    assert env.reset(task) == stock.reset(task)
    for command in [*plan[:-1], plan[-1].replace("put", "move").replace("in/on", "to"), plan[-1]]:
        now = env.step(command)
        assert now == stock.step(command)
    assert re.search(r"^You put the \w+ \d+ in/on the \w+ \d+\.$", now.text)


NO_DATA = {
    "nothing there": lambda root: remove(root),
    "no such split": lambda root: remove(root / "valid_seen"),
    "an empty split": lambda root: [remove(p) for p in (root / "valid_seen").iterdir()],
    "trajectories without games": lambda root: [p.unlink() for p in root.rglob("game.tw-pddl")],
    "no game is solvable": lambda root: [rewrite(p, solvable=False) for p in root.rglob("game.tw-pddl")],
    "a torn game": lambda root: [p.write_bytes(p.read_bytes()[:999]) for p in pick_game(root)],
    "an empty game": lambda root: [p.write_bytes(b"") for p in pick_game(root)],
    "a game of bytes": lambda root: [p.write_bytes(b"\x80\xff") for p in pick_game(root)],
    "a game that is a list": lambda root: [p.write_text("[]") for p in pick_game(root)],
    "a game that is null": lambda root: [p.write_text("null") for p in pick_game(root)],
    "no PDDL domain": lambda root: [rewrite(p, pddl_domain="gone") for p in pick_game(root)],
    "no PDDL problem": lambda root: [rewrite(p, pddl_problem="gone") for p in pick_game(root)],
    "no grammar": lambda root: [rewrite(p, grammar="gone") for p in pick_game(root)],
    "the grammar is null": lambda root: [rewrite(p, grammar=None) for p in pick_game(root)],
    "the grammar is torn": lambda root: [rewrite(p, grammar="action look {") for p in pick_game(root)],
}


def remove(path):
    for inner in path.iterdir() if path.is_dir() else ():
        remove(inner)
    path.rmdir() if path.is_dir() else path.unlink()


def pick_game(root):
    return [p for p in root.rglob("game.tw-pddl") if "valid_seen/pick_and_place_simple" in p.as_posix()]


def rewrite(path, **changes):
    game = {k: v for k, v in {**json.loads(path.read_text()), **changes}.items() if v != "gone"}
    path.write_text(json.dumps(game), encoding="utf-8")


@pytest.mark.parametrize("fault", NO_DATA)
def test_official_data_that_is_missing_or_broken(fault, env, official):
    root, _ = official
    NO_DATA[fault](root)

    def play_all():
        for task in env.panel("official/valid_seen"):
            make("household").reset(task)
            env.grammar(task)

    with pytest.raises(EnvError, match="alfworld-download") as caught:
        play_all()
    one_line(caught)


def test_an_official_game_that_vanished(env, official):
    root, _ = official
    task = env.panel("official/valid_seen")[0]
    (root / task.spec["file"]).unlink()
    with pytest.raises(EnvError, match="alfworld-download") as caught:
        make("household").reset(task)
    one_line(caught)


def test_official_splits_have_names(env, official):
    with pytest.raises(EnvError, match="no official split 'test'; there are train, valid_seen, valid_unseen"):
        env.panel("official/test")
    with pytest.raises(EnvError, match="alfworld-download"):
        env.panel("official/train")  # only the validation games are there


def test_no_official_data_at_all(env, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_ALFWORLD_DATA", str(tmp_path))
    for split in SPLITS:
        with pytest.raises(EnvError, match="run `alfworld-download`, or set ALFWORLD_DATA") as caught:
            env.panel(f"official/{split}")
        assert str(tmp_path) in str(caught.value)
        one_line(caught)
