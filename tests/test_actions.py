"""One valid or invalid action a kind of output; every invalid one has its own reason."""

import pytest

from seedkit import actions
from seedkit.actions import parse_action

ADMISSIBLE = ("go to desk 1", "take Mug 1 from desk 1", "look")

VALID = [
    ("bare", "go to desk 1", "go to desk 1"),
    ("bare, stripped", "\n  look \n", "look"),
    ("inner spaces", "go  to\tdesk 1", "go to desk 1"),
    ("tagged", "<action>look</action>", "look"),
    ("tag on its own lines", "<action>\ngo to desk 1\n</action>\n", "go to desk 1"),
    ("tag in capitals and with spaces", "< Action >look</ ACTION >", "look"),
    ("reasoning, then tag", "<think>The desk.</think>\n<action>go to desk 1</action>", "go to desk 1"),
    ("reasoning, then bare", "<think>The desk.</think>\ngo to desk 1", "go to desk 1"),
    ("empty reasoning", "<think>\n\n</think>\n\n<action>look</action>", "look"),
    ("two blocks of reasoning", "<think>a</think><think>b</think><action>look</action>", "look"),
    ("draft in the reasoning", "<think><action>look</action></think><action>go to desk 1</action>", "go to desk 1"),
    (
        "unclosed draft in the reasoning",
        "<think>maybe <action>look</think><action>go to desk 1</action>",
        "go to desk 1",
    ),
    ("draft tags the wrong way round", "<think></action>x<action></think>look", "look"),
    ("prose before the tag", "I go to the desk.\n<action>go to desk 1</action>", "go to desk 1"),
    ("prose, reasoning, tag", "Well. <think>a</think> So: <action>look</action>", "look"),
    ("letter case", "Take mug 1 FROM desk 1", "take Mug 1 from desk 1"),
]

INVALID = [
    ("None", None, actions.NOT_TEXT),
    ("number", 3, actions.NOT_TEXT),
    ("bytes", b"look", actions.NOT_TEXT),
    ("list", ["look"], actions.NOT_TEXT),
    ("nothing", "", actions.EMPTY),
    ("whitespace", " \n\t\u00a0", actions.EMPTY),
    ("empty tag", "<action></action>", actions.EMPTY),
    ("blank tag", "<action> \n </action>", actions.EMPTY),
    ("only reasoning", "<think>look</think>", actions.EMPTY),
    ("answer only as a draft", "<think><action>look</action></think>", actions.EMPTY),
    ("reasoning never closed", "<think>maybe <action>look</action>", actions.UNCLOSED_THINK),
    ("reasoning reopened and cut off", "<think>a</think><think>look", actions.UNCLOSED_THINK),
    ("cut off in the answer", "<think>a</think><action>go to desk", actions.UNCLOSED_ACTION),
    ("opened twice", "<action>look<action>go to desk 1</action>", actions.UNCLOSED_ACTION),
    ("never opened", "look</action>", actions.TAG_ORDER),
    ("closed before it opens", "</action>look<action>", actions.TAG_ORDER),
    ("reasoning never opened", "hm</think><action>look</action>", actions.TAG_ORDER),
    ("answer before the reasoning", "<action>look</action><think>a</think>", actions.TAG_ORDER),
    ("reasoning inside the answer", "<action><think>a</think>look</action>", actions.TAG_ORDER),
    ("bare answer before the reasoning", "look <think>a</think>", actions.TAG_ORDER),
    ("bare answers around the reasoning", "look <think>a</think> go to desk 1", actions.TAG_ORDER),
    ("two answers", "<action>look</action><action>go to desk 1</action>", actions.SEVERAL),
    ("the same answer twice", "<action>look</action>\n<action>look</action>", actions.SEVERAL),
    ("empty, then an answer", "<action></action><action>look</action>", actions.SEVERAL),
    ("goes on after the answer", "<action>look</action> or go to desk 1", actions.TEXT_AFTER),
    ("two bare lines", "look\ngo to desk 1", actions.SEVERAL_LINES),
    ("two lines in the tag", "<action>look\ngo to desk 1</action>", actions.SEVERAL_LINES),
    ("line separator", "look\u2028look", actions.SEVERAL_LINES),
    ("control character", "lo\x00ok", actions.CONTROL),
    ("lone surrogate", "look \ud800", actions.CONTROL),
    ("unknown action", "fly", actions.NOT_ADMISSIBLE),
    ("part of an action", "go to desk", actions.NOT_ADMISSIBLE),
    ("reasoning without tags", "I think that I look", actions.NOT_ADMISSIBLE),
]


@pytest.mark.parametrize(("text", "action"), [pytest.param(t, a, id=kind) for kind, t, a in VALID])
def test_valid(text, action):
    parsed = parse_action(text, ADMISSIBLE)
    assert (parsed.text, parsed.valid, parsed.reason) == (action, True, None)


@pytest.mark.parametrize(("text", "reason"), [pytest.param(t, r, id=kind) for kind, t, r in INVALID])
def test_invalid(text, reason):
    parsed = parse_action(text, ADMISSIBLE)
    assert (parsed.valid, parsed.reason) == (False, reason)


def test_every_reason_has_a_case():
    assert {reason for _, _, reason in INVALID} == set(actions.REASONS)


def test_free_text_without_a_list_keeps_its_case():
    assert parse_action("search[Barack Obama]").text == "search[Barack Obama]"
    assert parse_action("search[Barack Obama]").valid


def test_an_empty_list_accepts_nothing():
    assert parse_action("look", []).reason == actions.NOT_ADMISSIBLE


def test_a_refused_action_is_still_readable():
    assert parse_action("<action>fly  away</action>", ADMISSIBLE).text == "fly away"


def test_admissible_may_be_an_iterator():
    assert parse_action("look", iter(ADMISSIBLE)).valid


def test_an_exact_match_wins_over_letter_case():
    assert parse_action("b", ["B", "b"]).text == "b"
