"""Made-up trajectories for views: any tokens, any numbers, no model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from seedkit.types import Shifts, Skill, Task, Trajectory, Turn

# Text that breaks views: markup, comment openers, line separators, bidi controls, lone and split bytes, wide scripts.
HOSTILE = (
    b"</script><img src=x onerror=alert(1)>", b"<!--", b"-->", b"<tool_call>", b"]]>", b"&lt;", b"&#x202e;", b"'\"`",
    b"<svg/onload=alert(1)>", b"javascript:alert(1)", b"{{7*7}}", b"\x00", b"\x1b[31m", "\u202eabc\u202c".encode(),
    "\u200b".encode(), "\u2066x\u2069".encode(), "\u2028".encode(), "\u2029".encode(), "\ufeff".encode(), b"\xe2",
    b"\x82", b"\xff", b"\xf0\x9f", b"\x98\x80", "한국어".encode(), "안".encode()[:2], "안".encode()[2:],
    "مرحبا".encode(),    " بك".encode(), "e\u0301".encode(), "👩\u200d💻".encode(), b"\n", b"\t", b"   ", b"", b"\r",
    "\U000e0041".encode(),    b" plain", "日本".encode(), b"__proto__",
)  # fmt: skip


def trajectory(
    turns: Sequence[tuple[Sequence[int], Sequence[int]]], name: str = "made/0.0", *, success=True, truncated=False
) -> Trajectory:
    """An episode from (context ids, response ids) a turn; every behaviour log-probability is -0.5 - n/100."""
    made, n = [], 0
    for number, (context, response) in enumerate(turns):
        logp = tuple(-0.5 - (n + i) % 100 / 100 for i in range(len(response)))
        n += len(response)
        made.append(Turn(f"observation {number}", (), tuple(context), tuple(response), logp, "look", True))
    task = Task(name.split("/")[0], "made", "train", "pick")
    protocol = {"temperature": 1.0, "policy": "made"}
    reward = float(success)
    return Trajectory(name, task, tuple(made), success, reward, "v0", 0, "the end", truncated, protocol=protocol)


def shifts(t: Trajectory, seed: int = 0, *, scale: float = 1.0, tokens: int = 7) -> Shifts:
    """Random shifts of an episode's tokens."""
    rng = random.Random(f"{t.id}-{seed}")
    teacher = tuple(min(0.0, s + rng.gauss(0, scale)) for s in t.behaviour_logp)
    mask = (True,) * len(teacher)
    return Shifts(t.id, t.response_ids, t.turn_index, t.behaviour_logp, teacher, mask, tokens, f"s{seed}", None, "v0")


def hostile() -> tuple[Trajectory, Mapping[int, bytes]]:
    """Every hostile token sampled once, in two turns, with the same tokens as context before."""
    ids = range(len(HOSTILE))
    return trajectory([(ids, ids), (ids, [*ids][::-1])]), dict(enumerate(HOSTILE))


def long(tokens: int, turns: int, words: int, seed: int = 0) -> tuple[Trajectory, Mapping[int, bytes]]:
    """A long episode over a large vocabulary; nearly every token is a sampled one."""
    rng = random.Random(seed)
    each = tokens // turns
    made = [([0, 1, 2], [rng.randrange(words) for _ in range(each - 3)]) for _ in range(turns)]
    used = {i for context, response in made for i in (*context, *response)}
    return trajectory(made, "long/0.0"), {i: f" w{i}".encode() for i in used}


SKILL = Skill(
    "To put a hot thing in its place: find it, take it, heat it, then move it.", {1: "Open what is closed."}
)
