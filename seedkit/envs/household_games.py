"""Games for the household environment: a compact spec in, one of ALFWorld's own TextWorld-PDDL games out.

Implements: all six ALFRED task types in the 120 ALFRED floor plans (kitchen, living room, bedroom, bathroom),
with ALFRED's vocabulary, containment and "can be heated / cooled / cleaned" facts, goals, PDDL domain and
grammar, read from the installed `alfworld` package. Leaves out: movable receptacles and slicing, which ALFWorld's
six task types do not use. Distances play no role (ALFWorld's domain charges 1 a move).
"""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from seedkit.types import Task, digest

KINDS = ("pick", "look", "clean", "heat", "cool", "two")

ALFRED_TYPE = {
    "pick": "pick_and_place_simple",
    "look": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
TOOL = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
ABILITY = {"clean": "Cleanable", "heat": "Heatable", "cool": "Coolable"}
# Receptacles that a floor plan's objects file names without a position: how many of each a room has.
FIXED_COUNT = {"StoveBurner": 2}
MOST_OF_A_KIND = 4
MOST_ALIKE = 3  # objects of one type among the distractors
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf", "TVStand")


class SpecError(ValueError):
    """A game spec that names something ALFWorld does not have, or cannot be played."""


@functools.cache
def facts() -> dict[str, Any]:
    """ALFRED's facts as `alfworld` ships them: what holds what, what can be done to what, floor plans, goals."""
    from alfworld.gen import constants, goal_library

    contains = {r: set(o) for r, o in constants.VAL_RECEPTACLE_OBJECTS.items()}
    movable = {"Bowl", "Mug", "Plate", "Cup", "Pot", "Pan", "Box"}
    receptacles = {r for r in contains if r not in movable}
    objects = {o for r in receptacles for o in contains[r] if not o.endswith("Sliced")}
    data = Path(str(resources.files("alfworld"))) / "data"
    return {
        "contains": contains,
        "receptacles": receptacles,
        "objects": objects,
        "can": {k: set(v) for k, v in constants.VAL_ACTION_OBJECTS.items()},
        "openable": set(constants.OPENABLE_CLASS_LIST),
        "rooms": {k: {r.lower() for r in constants.GOALS_VALID[t]} for k, t in ALFRED_TYPE.items()},
        "goals": goal_library.gdict,
        "unseen_plans": frozenset(constants.TEST_SCENE_NUMBERS),
        "domain": (data / "alfred.pddl").read_text(),
        "grammar": (data / "alfred.twl2").read_text(),
    }


@functools.cache
def floor_plan(number: int) -> tuple[Counter, frozenset[str]]:
    """Receptacles (with how many of each) and object types of one ALFRED floor plan."""
    layouts = Path(str(resources.files("alfworld"))) / "gen" / "layouts"
    try:
        present = set(json.loads((layouts / f"FloorPlan{number}-objects.json").read_text()))
        placed = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
    except FileNotFoundError as error:
        raise SpecError(f"floor plan {number!r}: ALFRED has 1-30, 201-230, 301-330 and 401-430") from error
    known = facts()
    counts = Counter(name for name in (key.split("|")[0] for key in placed) if name in known["receptacles"])
    for name in present & known["receptacles"]:
        counts.setdefault(name, FIXED_COUNT.get(name, 1))
    return counts, frozenset(present & known["objects"]) | (present & {"DeskLamp", "FloorLamp"})


def room_of(plan: int) -> str:
    """The kind of room an ALFRED floor plan number stands for."""
    return {0: "kitchen", 2: "livingroom", 3: "bedroom", 4: "bathroom"}[plan // 100]


def possible_goals(plan: int) -> list[tuple[str, str, str]]:
    """Every (kind, object, target) that can be asked for in a floor plan; the target of `look` is its lamp."""
    known = facts()
    counts, objects = floor_plan(plan)
    kinds = {kind for kind in KINDS if room_of(plan) in known["rooms"][kind]}
    goals = []
    for name in sorted(objects & known["objects"]):
        homes = [r for r in sorted(counts) if name in known["contains"][r]]
        if len(homes) < 2:
            continue
        if any(stand in counts for stand in LAMP_STANDS):
            goals += [("look", name, lamp) for lamp in sorted(objects & {"DeskLamp", "FloorLamp"})]
        for target in homes:
            goals += [("pick", name, target), ("two", name, target)]
            for kind, tool in TOOL.items():
                if tool in counts and tool != target and name in known["can"][ABILITY[kind]]:
                    goals.append((kind, name, target))
    return [goal for goal in goals if goal[0] in kinds]


def make_spec(
    plan: int, kind: str, name: str, target: str, seed: int, *, receptacles: int, distractors: int, closed: float
) -> dict[str, Any]:
    """The compact spec of one game; `closed` is the chance that a goal object starts inside a closed container."""
    return {
        "plan": plan,
        "kind": kind,
        "object": name,
        "target": target,
        "seed": seed,
        "receptacles": receptacles,
        "distractors": distractors,
        "closed": closed,
    }


def check_spec(spec: Any) -> dict[str, Any]:
    """Return the spec if a game can be built from it; raise `SpecError` naming the field that is wrong."""
    if not isinstance(spec, dict):
        raise SpecError(f"a game spec is an object with plan, kind, object, target, seed; got {type(spec).__name__}")
    for key in ("plan", "kind", "object", "target", "seed", "receptacles", "distractors", "closed"):
        if key not in spec:
            raise SpecError(f"game spec lacks the field {key!r}")
    for key in ("plan", "seed", "receptacles", "distractors"):
        if isinstance(spec[key], bool) or not isinstance(spec[key], int) or spec[key] < 0:
            raise SpecError(f"game spec field {key!r} must be a whole number >= 0, got {spec[key]!r}")
    if (
        isinstance(spec["closed"], bool)
        or not isinstance(spec["closed"], (int, float))
        or not 0 <= spec["closed"] <= 1
    ):
        raise SpecError(f"game spec field 'closed' must be a probability, got {spec['closed']!r}")
    if spec["kind"] not in KINDS:
        raise SpecError(f"game spec field 'kind' must be one of {', '.join(KINDS)}, got {spec['kind']!r}")
    if (spec["kind"], spec["object"], spec["target"]) not in possible_goals(spec["plan"]):
        raise SpecError(
            f"floor plan {spec['plan']} cannot host the goal {spec['kind']} {spec['object']!r} -> {spec['target']!r}"
        )
    most = MOST_ALIKE * len(floor_plan(spec["plan"])[1] - {spec["object"], "DeskLamp", "FloorLamp"})
    if spec["distractors"] > most:
        raise SpecError(
            f"game spec field 'distractors' must be at most {most} in floor plan {spec['plan']}, "
            f"got {spec['distractors']}"
        )
    return spec


def _choose_receptacles(spec: dict[str, Any], rng: random.Random) -> list[str]:
    """Types of the receptacles in the game, one entry an instance, the ones that the goal needs first."""
    known = facts()
    counts, _ = floor_plan(spec["plan"])
    counts = Counter({r: min(n, MOST_OF_A_KIND) for r, n in counts.items()})
    needed = [TOOL[spec["kind"]]] if spec["kind"] in TOOL else []
    if spec["kind"] == "look":
        needed.append(next(r for r in LAMP_STANDS if r in counts))
    else:
        needed.append(spec["target"])
    homes = sorted(r for r in counts if spec["object"] in known["contains"][r] and r != spec["target"])
    shut = [r for r in homes if r in known["openable"]]
    flat = [r for r in homes if r not in known["openable"]]
    preferred = shut if rng.random() < spec["closed"] else flat
    needed.append(rng.choice(preferred or homes))
    chosen = []
    for name in needed:
        if name not in chosen:
            chosen.append(name)
    pool = [r for r in sorted(counts) for _ in range(counts[r] - (r in chosen))]
    rng.shuffle(pool)
    chosen += pool[: max(0, spec["receptacles"] - len(chosen))]
    return chosen


def build_problem(spec: dict[str, Any]) -> tuple[str, str]:
    """PDDL problem and task sentence of a spec; the same spec always gives the same text."""
    known = facts()
    rng = random.Random(digest({k: spec[k] for k in sorted(spec)}))
    receptacles = _choose_receptacles(spec, rng)
    number: Counter = Counter()
    ids: list[tuple[str, str]] = []
    for name in receptacles:
        number[name] += 1
        stem = (
            f"Sink_bar_{number[name]:02d}_bar_SinkBasin" if name == "SinkBasin" else f"{name}_bar_{number[name]:02d}"
        )
        if name == "BathtubBasin":
            stem = f"Bathtub_bar_{number[name]:02d}_bar_BathtubBasin"
        ids.append((stem, name))

    placed: list[tuple[str, str, str]] = []  # object id, object type, receptacle id
    count: Counter = Counter()

    def put(kind: str, where: str) -> None:
        count[kind] += 1
        placed.append((f"{kind}_bar_{count[kind]:02d}", kind, where))

    def homes(kind: str, avoid: str | None = None) -> list[tuple[str, str]]:
        return [(i, r) for i, r in ids if kind in known["contains"][r] and r != avoid]

    target = None if spec["kind"] == "look" else spec["target"]
    for _ in range(2 if spec["kind"] == "two" else 1):
        options = homes(spec["object"], avoid=target)
        shut = [h for h in options if h[1] in known["openable"]]
        flat = [h for h in options if h[1] not in known["openable"]]
        preferred = shut if rng.random() < spec["closed"] else flat
        put(spec["object"], rng.choice(preferred or options)[0])
    if spec["kind"] == "look":
        put(spec["target"], rng.choice([i for i, r in ids if r in LAMP_STANDS]))
    _, present = floor_plan(spec["plan"])
    others = sorted(o for o in present & known["objects"] if o != spec["object"] and homes(o))
    for _ in range(spec["distractors"] if others else 0):
        kind = rng.choice(others)
        if count[kind] < MOST_ALIKE:
            put(kind, rng.choice(homes(kind))[0])

    lines = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_0)"]
    for n, (rid, rtype) in enumerate(ids, 1):
        lines += [f"(receptacleType {rid} {rtype}Type)", f"(receptacleAtLocation {rid} loc_bar_{n})"]
        lines += [f"(openable {rid})"] if rtype in known["openable"] else []
    location = {rid: f"loc_bar_{n}" for n, (rid, _) in enumerate(ids, 1)}
    for oid, otype, rid in placed:
        lines += [f"(objectType {oid} {otype}Type)", f"(inReceptacle {oid} {rid})"]
        lines.append(f"(objectAtLocation {oid} {location[rid]})")
        lines.append(f"(toggleable {oid})" if otype in known["can"]["Toggleable"] else f"(pickupable {oid})")
        lines += [f"({a.lower()} {oid})" for a in ("Cleanable", "Heatable", "Coolable") if otype in known["can"][a]]
    rtypes = sorted({r for _, r in ids} | {"SinkBasin", "Microwave", "Fridge"})
    otypes = sorted({o for _, o, _ in placed} | {"Knife", "ButterKnife"})
    for rtype in rtypes:
        lines += [f"(canContain {rtype}Type {o}Type)" for o in otypes if o in known["contains"][rtype]]
    declared = ["agent1 - agent"]
    declared += [f"loc_bar_{n} - location" for n in range(len(ids) + 1)]
    declared += [f"{i} - receptacle" for i, _ in ids] + [f"{i} - object" for i, _, _ in placed]
    declared += [f"{r}Type - rtype" for r in rtypes] + [f"{o}Type - otype" for o in otypes]

    goal = known["goals"][ALFRED_TYPE[spec["kind"]]]
    names = {"obj": spec["object"], "recep": spec["target"], "toggle": spec["target"]}
    goal_text = goal["pddl"].replace("#", "-").format(**names).strip()
    goal_text = goal_text.removesuffix(")").strip()  # ALFWorld's goal closes the problem's own bracket as well
    task = rng.choice(goal["templates"]).format(**{k: v.lower() for k, v in names.items()})
    body = "\n  ".join(lines)
    problem = (
        f"(define (problem plan_{spec['plan']})\n (:domain alfred)\n (:objects\n  "
        + "\n  ".join(declared)
        + f"\n )\n (:init\n  {body}\n )\n {goal_text}\n (:metric minimize (total-cost))\n)\n"
    )
    return problem, task


def build_game(spec: dict[str, Any], walkthrough: list[str] | None = None) -> dict[str, Any]:
    """The game as the JSON object that TextWorld's PDDL environment loads."""
    problem, task = build_problem(check_spec(spec))
    known = facts()
    game = {
        "pddl_domain": known["domain"],
        "grammar": known["grammar"].replace("UNKNOWN GOAL", task),
        "pddl_problem": problem,
        "task": task,
        "spec": spec,
    }
    return game | ({} if walkthrough is None else {"walkthrough": walkthrough, "solvable": True})


def household_task(split: str, spec: dict[str, Any], walkthrough: list[str]) -> Task:
    """A task whose id says what it is and whose hash pins the whole game."""
    name = f"{spec['kind']}-{spec['object']}-{spec['target']}-{spec['plan']}-{digest(spec, 6)}"
    return Task(name, "household", split, spec["kind"], spec | {"walkthrough": walkthrough})


def goal_is_unseen(kind: str, name: str, target: str) -> bool:
    """Held-out combinations: a fixed third of all (kind, object, target), by hash, never in training."""
    return int(digest([kind, name, target], 8), 16) % 3 == 0


def sample_specs(
    split: str, count: int, seed: int, *, receptacles=(4, 6), distractors=(2, 5), closed: float = 0.35
) -> list[dict[str, Any]]:
    """`count` specs of a split, task types in equal shares, without repeats.

    `train` and `valid_seen` draw from ALFRED's training floor plans and two thirds of the goals, `valid_unseen`
    from its test floor plans and the other third. The caller removes `train` games from `valid_seen`.
    """
    rng = random.Random(f"{split}-{seed}")
    unseen = split == "valid_unseen"
    held = facts()["unseen_plans"]
    plans = [base + n for base in (0, 200, 300, 400) for n in range(1, 31) if ((base + n) in held) == unseen]
    by_kind: dict[str, list[tuple[int, str, str]]] = {k: [] for k in KINDS}
    for plan in plans:
        for kind, name, target in possible_goals(plan):
            if goal_is_unseen(kind, name, target) == unseen:
                by_kind[kind].append((plan, name, target))
    specs, seen = [], set()
    while len(specs) < count:
        kind = KINDS[len(specs) % len(KINDS)]
        # rooms first, then the goal, so that kitchens do not crowd out the rest
        rooms = sorted({room_of(plan) for plan, _, _ in by_kind[kind]})
        room = rng.choice(rooms)
        plan, name, target = rng.choice([g for g in by_kind[kind] if room_of(g[0]) == room])
        spec = make_spec(
            plan,
            kind,
            name,
            target,
            rng.randrange(10**6),
            receptacles=rng.randint(*receptacles),
            distractors=rng.randint(*distractors),
            closed=closed,
        )
        if digest(spec) not in seen:
            seen.add(digest(spec))
            specs.append(spec)
    return specs
