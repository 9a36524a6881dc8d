"""Formats of other people's rollouts: a file's bytes as episodes of text, of which `seedkit.foreign` makes tokens.

| format | what it is | a turn |
|---|---|---|
| `messages` | OpenAI-style chat, JSON or JSONL: `{"messages": [...]}` or a bare list | an assistant message |
| `verl` | verl's `trainer.rollout_data_dir`: `input`, `output`, `score`, `step` a line | a line |
| `steps` | verl-agent and SDAR: one record a step, with its `traj_uid`, prompt and response | a record |
| `react` | ReAct's ALFWorld transcripts: text with `> action` or `Act 1: action` lines | an action or a thought |

messages: what stands between two assistant messages is one observation, joined by blank lines. A tool's result is
written `<tool_response>…</tool_response>`; of the assistant, `reasoning_content` is written `<think>…</think>` before
its text, and each of `tool_calls` `<tool_call>{"name": …, "arguments": …}</tool_call>` after it.
verl: the prompt stays as decoding left it; an output with a tool's results in it is skipped, for nothing says which
of its tokens were sampled.
steps: the observation is `anchor_obs`, or what the prompt calls the current observation, in the first step with the
task. The order is `step_num`, `turn_step` or `step` (unless all have the same: verl's training step), else the
file's; a missing step is noticed by these numbers or by `episode_lengths`, and not without them. The last step tells
the outcome.
react: few-shot examples before "Here is the task." are left out; episodes end at a line of dashes.

Leaves out: images, and formats with other names for the same fields.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FORMATS = {"messages": {"messages"}, "steps": {"traj_uid"}, "verl": {"input", "output"}, "react": None}
"""The formats, and the fields by which a JSON record is known to be of one."""


class BadRecord(Exception):
    """Why a record is no trajectory: (a reason to count, what is so in this case)."""


@dataclass
class Episode:
    """What a record of any format tells: (observation, response) a turn, and the rest where it is there."""

    turns: list[tuple[str, str]]
    final: str = ""
    group: Any = None
    reward: float | None = None
    success: bool | None = None
    admissible: list[tuple[str, ...]] = field(default_factory=list)


def attempt(read: Callable[..., Any], *args: Any) -> Any:
    """What `read` returns, or the `BadRecord` that it raises."""
    try:
        return read(*args)
    except BadRecord as bad:
        return bad.with_traceback(None)  # which would keep the whole record
    except RecursionError:
        return BadRecord("nested too deeply")


def episodes(data: bytes, format: str | None) -> tuple[str | None, list[tuple[int, Episode | BadRecord]]]:
    """The format, and the episode (or what is wrong) of each numbered record."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if format == "react" or (format is None and data.lstrip()[:1] not in (b"{", b"[")):
        parts = attempt(_react, data)
        if format or (isinstance(parts, list) and parts):
            return "react", [(1, parts)] if isinstance(parts, BadRecord) else parts
        if format is None and not re.search(rb"^[ \t]*[{\[]", data, re.MULTILINE):
            return None, [
                (1, parts if isinstance(parts, BadRecord) else BadRecord("no JSON, no line with an action"))
            ]
    whole = attempt(_json, data)
    if isinstance(whole, BadRecord):
        lines = enumerate(data.split(b"\n"), 1)
        records = [(n, attempt(_json, line)) for n, line in lines if line.strip()]
    else:
        records = list(enumerate(whole if isinstance(whole, list) and not _format_of(whole) else [whole], 1))
    format = format or next(filter(None, (_format_of(record) for _, record in records)), None)
    readers = {"messages": _messages, "verl": _verl, None: _unknown}
    if format == "steps":
        return format, _steps(records)
    return format, [(n, r if isinstance(r, BadRecord) else attempt(readers[format], r)) for n, r in records]


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", str(error)) from None
    except ValueError as error:
        raise BadRecord("not JSON", str(error)) from None


def _format_of(record: Any) -> str | None:
    if isinstance(record, list):
        return "messages" if any(isinstance(one, dict) and "role" in one for one in record) else None
    known = FORMATS.items() if isinstance(record, dict) else ()
    return next((name for name, fields in known if fields and fields <= record.keys()), None)


# Fields of a record


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise BadRecord(f"{what} should be {_NAMES[kind]}", f"is {value!r:.40}")
    return value


_NAMES = {str: "text", list: "a list", dict: "an object"}


def _text(record: Any, *names: str) -> str:
    """The text under the first name that is there."""
    held = _typed(record, dict, "a record")
    return _typed(next((held[name] for name in names if name in held), None), str, " or ".join(names))


def _number(record: dict[str, Any], *names: str) -> float | None:
    """The finite number (or truth, as 0 or 1) under the first name that is there and not null."""
    name, value = next(((n, record[n]) for n in names if record.get(n) is not None), ("", None))
    if value is not None and not (isinstance(value, (int, float)) and abs(value) < 1e300):
        raise BadRecord(f"{name} should be a finite number", f"is {value!r:.40}")
    return None if value is None else float(value)


def _outcome(record: dict[str, Any]) -> dict[str, Any]:
    success = _number(record, "success", "won", "is_success")
    if success not in (None, 0.0, 1.0):
        raise BadRecord("success should be true or false", f"is {success}")
    reward = _number(record, "episode_rewards", "reward", "score")
    return {"reward": reward, "success": None if success is None else success == 1}


# The formats


def _unknown(record: Any) -> Episode:
    raise BadRecord("no known format", f"is {record!r:.40}")


def _messages(record: Any) -> Episode:
    bare = isinstance(record, list)
    messages = _typed(record if bare else _typed(record, dict, "a record").get("messages"), list, "messages")
    turns: list[tuple[str, str]] = []
    context: list[str] = []
    for role, text in map(_message, messages):
        if role == "assistant":
            turns.append(("\n\n".join(context), text))
            context = []
        else:
            context.append(text)
    return Episode(turns, "\n\n".join(context), **({} if bare else _outcome(record)))


def _message(message: Any) -> tuple[str, str]:
    """Role and text of a message, calls of tools and their results written out."""
    role, content = _text(message, "role"), message.get("content")
    if isinstance(content, list):
        if odd := [part for part in content if not isinstance(part, dict) or part.get("type") != "text"]:
            raise BadRecord("a part of the content is not text", f"is {odd[0]!r:.40}")
        content = "".join(_text(part, "text") for part in content)
    text = "" if content is None else _typed(content, str, "content")
    if role in ("tool", "function"):
        return role, f"<tool_response>\n{text}\n</tool_response>"
    if role in ("system", "developer", "user"):
        return role, text
    if role != "assistant":
        raise BadRecord("unknown role", repr(role)[:40])
    parts = [text] if text else []
    if message.get("reasoning_content"):
        parts.insert(0, f"<think>\n{_text(message, 'reasoning_content')}\n</think>\n")
    calls = message.get("tool_calls")
    for call in [] if calls is None else _typed(calls, list, "tool_calls"):
        function = _typed(_typed(call, dict, "a tool call").get("function"), dict, "function")
        given, name = function.get("arguments"), json.dumps(_text(function, "name"), ensure_ascii=False)
        given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {given}}}\n</tool_call>')
    return role, "\n".join(parts)


def _verl(record: Any) -> Episode:
    prompt, output = _text(record, "input"), _text(record, "output")
    lines = [line.strip() for line in output.split("\n")]
    other = min((lines.index(role) for role in ("user", "tool") if role in lines), default=len(lines))
    if "<tool_response>" in output or "<information>" in output or "assistant" in lines[other:]:
        raise BadRecord("the output holds text that was not sampled")
    return Episode([(prompt, output)], group=[record.get("step"), prompt], **_outcome(record))


def _steps(records: list[tuple[int, Any]]) -> list[tuple[int, Episode | BadRecord]]:
    """Records of one `traj_uid` as one episode, which has the number of its first record."""
    groups: dict[str, list[Any]] = {}
    out: dict[int, Any] = {}
    for n, record in records:
        uid = record if isinstance(record, BadRecord) else attempt(_text, record, "traj_uid")
        if isinstance(uid, BadRecord) or uid not in groups:
            out[n] = uid
        if isinstance(uid, str):
            groups.setdefault(uid, []).append(record)
    return [(n, uid if isinstance(uid, BadRecord) else attempt(_walk, groups[uid])) for n, uid in out.items()]


def _walk(steps: list[dict[str, Any]]) -> Episode:
    steps = _in_order([step for step in steps if step.get("active_masks") is not False])
    turns, admissible = [], []
    for step in steps:
        prompt = _text(step, "prompt", "input")
        seen = _text(step, "anchor_obs") if "anchor_obs" in step else _between(prompt, "current observation is:")
        task = _between(prompt, "Your task is to:", "\n")
        if seen and not turns and task.rstrip(".") not in seen:
            seen = f"{seen}\n\nYour task is to: {task}"
        turns.append((seen, _text(step, "response", "output")))
        allowed = _between(prompt, "admissible actions of the current situation are:", "].")
        admissible.append(tuple(re.findall(r"'([^'\n]+)'", allowed)))
    last = steps[-1] if steps else {}
    known, length = _outcome(last), _number(last, "episode_lengths")
    if length not in (None, len(steps)):
        raise BadRecord("missing steps", f"{len(steps)} of {length:g}")
    if known["reward"] is None and "rewards" in last:
        known["reward"] = sum(_number(step, "rewards") or 0.0 for step in steps)
    return Episode(turns, group=steps[0].get("uid") if steps else None, admissible=admissible, **known)


def _in_order(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for name in ("step_num", "turn_step", "step"):
        numbers: list[Any] = [step.get(name) for step in steps]
        if all(n is None for n in numbers) or (name == "step" and all(n == numbers[0] for n in numbers)):
            continue
        shown = f"{name}: {numbers!r:.60}"
        if not all(type(n) is int for n in numbers):
            raise BadRecord("step numbers should be integers", shown)
        if len(set(numbers)) < len(numbers):
            raise BadRecord("duplicate step numbers", shown)
        if min(numbers) not in (0, 1) or max(numbers) - min(numbers) >= len(numbers):
            raise BadRecord("missing steps", shown)
        return [steps[numbers.index(n)] for n in sorted(numbers)]
    return steps


def _between(text: str, mark: str, *ends: str) -> str:
    """What stands after a mark, up to the first of the ends (or of a prompt's usual next parts); "" without it."""
    after = text.partition(mark)[2]
    for end in ends or ("Your admissible actions", "Now it's your turn"):
        after = after.partition(end)[0]
    return after.strip()


_ACT = re.compile(r"(?:>|Act \d+:)(.*)")
_OBS = re.compile(r"Obs \d+: ?")
_RESULT = re.compile(r"\d+ r (True|False|0|1) rs ")
_START = re.compile(r"-= Welcome to TextWorld|You are in the middle of a room")


def _react(data: bytes) -> list[tuple[int, Episode]]:
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", str(error)) from None
    parts = enumerate(re.split(r"^-{5,}[ \t]*$", text, flags=re.MULTILINE), 1)
    lines = [(n, part.rpartition("Here is the task.")[2].split("\n")) for n, part in parts]
    return [(n, _transcript(part)) for n, part in lines if any(map(_ACT.match, part))]


def _transcript(lines: list[str]) -> Episode:
    turns: list[tuple[str, str]] = []
    context: list[str] = []
    success = None
    for line in lines:
        if result := _RESULT.match(line):
            success = result[1] in ("True", "1")
        elif act := _ACT.match(line):
            turns.append(("\n".join(context).strip(), act[1].strip()))
            context = []
        else:
            context.append(line.removeprefix(obs[0]) if (obs := _OBS.match(line)) else line)
    final = "\n".join(context).strip()
    if turns and turns[-1][1] == final == "":  # the last line asks for an action that never came
        final = turns.pop()[0]
    if turns and (start := _START.search(turns[0][0])):
        turns[0] = turns[0][0][start.start() :], turns[0][1]
    return Episode(turns, final, success=success)
