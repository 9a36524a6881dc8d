"""Read the policy's text as one action for the environment, or say why there is none.

The answer is the whole text, or what stands between `<action>` and `</action>`; closed `<think>…</think>` blocks and
prose may come before it, and a draft inside the reasoning never wins. A chat template that already opens `<think>`
in the prompt must hand that tag in with the text. Leaves out: repairing what a model meant; a doubtful answer is
invalid and counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from seedkit.types import Action

NOT_TEXT = "not text"
EMPTY = "empty"
UNCLOSED_THINK = "unclosed think"
UNCLOSED_ACTION = "unclosed action"
TAG_ORDER = "tags out of order"
SEVERAL = "several answers"
TEXT_AFTER = "text after the answer"
SEVERAL_LINES = "several lines"
CONTROL = "control character"
NOT_ADMISSIBLE = "not admissible"
REASONS = (
    NOT_TEXT,
    EMPTY,
    UNCLOSED_THINK,
    UNCLOSED_ACTION,
    TAG_ORDER,
    SEVERAL,
    TEXT_AFTER,
    SEVERAL_LINES,
    CONTROL,
    NOT_ADMISSIBLE,
)

_TAG = re.compile(r"<\s*+(/?)\s*+(think|action)\s*+>", re.IGNORECASE)


def parse_action(text: Any, admissible: Iterable[str] | None = None) -> Action:
    """The final answer in `text`, valid only if it is the one non-empty answer and admissible.

    Args:
        text: what the policy wrote, special tokens removed. Anything but a string is invalid.
        admissible: the actions that the environment accepts now; None: any. An empty list accepts nothing.

    Returns:
        The action with single spaces, in the spelling of `admissible` where letter case differs. When it is invalid,
        `reason` is one of `REASONS` and `text` is what was read as the answer, or "".
    """
    if not isinstance(text, str):
        return Action("", False, NOT_TEXT)
    answer, reason = _answer(text)
    lines = answer.strip().splitlines()
    if reason is None and len(lines) != 1:
        reason = SEVERAL_LINES if lines else EMPTY
    action = " ".join(answer.split())
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in action):
        return Action("", False, reason or CONTROL)
    if reason is None and admissible is not None:
        alike = [a for a in admissible if " ".join(a.split()).casefold() == action.casefold()]
        reason = None if alike else NOT_ADMISSIBLE
        action = action if action in alike or not alike else alike[0]
    return Action(action, reason is None, reason)


def _answer(text: str) -> tuple[str, str | None]:
    """The raw answer, and the reason why the tags around it do not mark exactly one."""
    answers: list[str] = []
    thinking = early = False  # inside <think>; text before a <think>
    start, end = None, 0  # where the open <action> begins; where the last tag ended
    for tag in _TAG.finditer(text):
        kind = (tag[1] + tag[2]).lower()
        if thinking:  # drafts do not count: only the end of the reasoning does
            thinking = kind != "/think"
        elif kind == "think" and start is None and not answers:
            thinking, early = True, early or bool(text[end : tag.start()].strip())
        elif kind == "action" and start is None:
            start = tag.end()
        elif kind == "/action" and start is not None:
            answers.append(text[start : tag.start()])
            start = None
        else:
            return "", UNCLOSED_ACTION if kind == "action" else TAG_ORDER
        end = tag.end()
    if thinking or start is not None:
        return "", UNCLOSED_THINK if thinking else UNCLOSED_ACTION
    if len(answers) > 1:
        return "", SEVERAL
    if answers and text[end:].strip():
        return answers[0], TEXT_AFTER
    if not answers and early:  # bare text on both sides of the reasoning
        return "", TAG_ORDER
    return (answers[0] if answers else text[end:]), None
