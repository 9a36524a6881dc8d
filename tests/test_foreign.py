"""Other people's rollouts: each format as text, the tokens of the scoring policy, and every broken row told."""

import codecs
import contextlib
import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from seedkit import train
from seedkit.envs import make
from seedkit.envs.base import data_dir
from seedkit.foreign import MAX_CHARACTERS, read_foreign, recognise, retokenize
from seedkit.gate import distill_loss
from seedkit.io import DataError, read_records, read_trajectories, write_trajectories
from seedkit.methods import METHODS, token_weights
from seedkit.objective import policy_loss
from seedkit.policy import Layout, Policy, PolicyError, load_policy
from seedkit.rescoring import contrast, rescore
from seedkit.train import RunError, Stage2Config, stage2
from seedkit.types import Skill

MARKERS = ["<bos>", "<user>", "<assistant>", "<end>", "<skill>", "<analyze>", "<pad>"]


@pytest.fixture(scope="module")
def policy():
    """An untrained model that reads bytes, as large language models' tokenizers in the end do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKERS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=len(fast), max_position_embeddings=2048, **sizes)
    return Policy(
        LlamaForCausalLM(config),
        fast,
        Layout("<bos><user>", "<user>", "<assistant>", "<end>", "<skill>", "<analyze>"),
        "bytes",
    )


@pytest.fixture(scope="module")
def tiny():
    return load_policy("household-tiny")


@pytest.fixture
def read(tmp_path, policy):
    """Write text, bytes or rows (as JSONL) to a file and read it."""

    def write_and_read(content, by=policy, **options):
        if isinstance(content, list):
            content = "\n".join(map(json.dumps, content))
        path = tmp_path / "rollouts.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_foreign(path, by, **options)

    return write_and_read


def said(policy, turn):
    """A response's text exactly, its end marker taken off."""
    assert turn.response_ids[-1] == policy.end_id
    return policy.tokenizer.decode(turn.response_ids[:-1], clean_up_tokenization_spaces=False)


def texts(policy, trajectory):
    return [(turn.observation, said(policy, turn)) for turn in trajectory.turns]


def user(text):
    return {"role": "user", "content": text}


def agent(text, **more):
    return {"role": "assistant", "content": text} | more


# --- the formats

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, user("Where is it?"), agent("look"), user("Here.")]}
STEP = (
    "You play.\nYour task is to: cool a mug.\nYour current observation is: {0}\n"
    "Your admissible actions of the current situation are: ['look'\n 'go to fridge 1'].\n\nNow it's your turn to act."
)


def step(n, uid="t1", action="look", **more):
    answer = f"<think>Step {n}.</think><action>{action}</action>"
    return {"traj_uid": uid, "uid": "g", "step_num": n, "prompt": STEP.format(f"seen {n}"), "response": answer} | more


def test_chat(read, policy):
    got = read(
        [CHAT | {"reward": 0.5}, CHAT["messages"], {"messages": [user("Hi."), agent("Ho."), user("Hm."), agent("!")]}]
    )
    assert got.format == "messages" and not got.skipped
    first, bare, two = got.trajectories
    assert texts(policy, first) == texts(policy, bare) == [("Be brief.\n\nWhere is it?", "look")]
    assert first.final_observation == "Here." and first.reward == 0.5 and math.isnan(bare.reward)
    assert texts(policy, two) == [("Hi.", "Ho."), ("Hm.", "!")]
    assert first.turns[0].action == "look" and first.turns[0].valid
    assert first.task.id == bare.task.id != two.task.id
    assert [t.id for t in got.trajectories] == ["rollouts.txt:1", "rollouts.txt:2", "rollouts.txt:3"]


@pytest.mark.parametrize(
    ("content", "count"), [(CHAT, 1), (CHAT["messages"], 1), ([CHAT], 1), ([CHAT["messages"], CHAT], 2)]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_chat_as_one_json_file(read, policy, content, count, indent):
    text = json.dumps(content, indent=indent).replace("\n", "\r\n")
    got = read(codecs.BOM_UTF8 + text.encode() + b"\r\n")
    assert [texts(policy, t) for t in got.trajectories] == [[("Be brief.\n\nWhere is it?", "look")]] * count


def test_tools_and_parts_are_written_out(read, policy):
    call = {"id": "c", "type": "function", "function": {"name": "open", "arguments": '{"what": "é"}'}}
    asked = agent(None, tool_calls=[call, {"function": {"name": "look", "arguments": {"far": True}}}])
    parts = [{"type": "text", "text": "Open "}, {"type": "text", "text": "it."}]
    result = {"role": "tool", "tool_call_id": "c", "content": "opened"}
    done = agent("Done.", reasoning_content="It is open.", tool_calls=[call])
    (t,) = read([{"messages": [user(parts), asked, result, done]}]).trajectories
    calls = '<tool_call>\n{"name": "open", "arguments": {"what": "é"}}\n</tool_call>'
    far = '<tool_call>\n{"name": "look", "arguments": {"far": true}}\n</tool_call>'
    assert texts(policy, t) == [
        ("Open it.", f"{calls}\n{far}"),
        ("<tool_response>\nopened\n</tool_response>", f"<think>\nIt is open.\n</think>\n\nDone.\n{calls}"),
    ]


def test_verl_dump(read, policy):
    rows = [
        {"input": "user\n2+2?\nassistant\n", "output": "4", "gts": "4", "score": 1.0, "step": 7, "acc": True},
        {"input": "user\n2+2?\nassistant\n", "output": "5", "score": 0.0, "step": 7, "success": False},
        {"input": "user\n2+2?\nassistant\n", "output": "5", "score": -1, "step": 8},
    ]
    got = read(rows)
    assert got.format == "verl"
    assert [t.reward for t in got.trajectories] == [1.0, 0.0, -1.0]
    assert texts(policy, got.trajectories[0]) == [("user\n2+2?\nassistant\n", "4")]
    a, b, later = (t.task.id for t in got.trajectories)
    assert a == b != later  # one group an update
    unknown = [t.protocol["unknown"] for t in got.trajectories]
    assert ["success" in names for names in unknown] == [True, False, True]
    assert not any("reward" in names for names in unknown)


def test_step_records_are_grouped_and_put_in_order(read, policy):
    rows = [
        step(1, action="go to  fridge 1"),
        step(0, "t2", action="fly"),
        step(0),
        step(2, won=True, active_masks=True),
    ]
    rows.append(step(3, active_masks=False))  # verl-agent's padding after the end
    got = read(rows)
    assert got.format == "steps" and not got.skipped
    first, second = got.trajectories
    assert texts(policy, first)[0] == (
        "seen 0\n\nYour task is to: cool a mug.",
        "<think>Step 0.</think><action>look</action>",
    )
    assert [turn.observation for turn in first.turns[1:]] == ["seen 1", "seen 2"]
    assert [turn.action for turn in first.turns] == ["look", "go to fridge 1", "look"]
    assert first.turns[0].admissible == ("look", "go to fridge 1")
    assert second.turns[0].reason == "not admissible" and not second.turns[0].valid
    assert first.success and first.reward == 1.0 and first.turns[2].reward == 1.0
    assert first.task.id == second.task.id and (first.id, second.id) == ("rollouts.txt:1", "rollouts.txt:2")


def test_step_records_as_verl_agent_names_them(read, policy):
    rows = [
        {"traj_uid": "a", "input": "...", "output": f"<action>go {n}</action>", "step": 40, "anchor_obs": f"at {n}"}
        | {"rewards": float(n), "episode_lengths": 3.0}
        for n in range(3)
    ]
    (t,) = read(rows).trajectories
    assert [turn.observation for turn in t.turns] == ["at 0", "at 1", "at 2"]  # one training step: the file's order
    assert t.reward == 3.0 and "success" in t.protocol["unknown"]
    (t,) = read([row | {"episode_rewards": 10.0} for row in rows]).trajectories
    assert t.reward == 10.0


KITCHEN = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a fridge 1, and a toaster 1.\n"
    "Your task is to: put some bread in fridge."
)
REACT = f"""{KITCHEN}
> think: bread is on the toaster.
OK.
> go to toaster 1
On the toaster 1, you see a bread 1.
> take bread 1 from toaster 1
You pick up the bread 1 from the toaster 1."""


def test_react_transcript(read, policy):
    (t,) = read(REACT).trajectories
    assert texts(policy, t) == [
        (KITCHEN, "think: bread is on the toaster."),
        ("OK.", "go to toaster 1"),
        ("On the toaster 1, you see a bread 1.", "take bread 1 from toaster 1"),
    ]
    assert t.final_observation == "You pick up the bread 1 from the toaster 1."
    assert t.protocol["format"] == "react" and not t.success and math.isnan(t.reward)
    (asked,) = read(REACT.replace("\n", "\r\n") + "\r\n>").trajectories
    assert texts(policy, asked) == texts(policy, t) and asked.final_observation == t.final_observation


def test_react_prompt_with_examples_and_the_notebook_output(read, policy):
    (t,) = read(f"Two examples.\n{REACT}\nHere is the task.\n{REACT}").trajectories
    assert len(t.turns) == 3 and t.turns[0].observation == KITCHEN
    printed = f"pick_and_place/trial_1\npick_and_place put\n{KITCHEN}\nAct 1: look\nObs 1: Nothing.\n"
    printed += "Act 2: go to fridge 1\nObs 2: Shut.\n"
    got = read(
        f"{printed}1 r True rs [1] cnts [1] 1.0\n------------\n\n{printed}2 r 0 rs [1] cnts [2] 0.5\n------------\n"
    )
    assert [t.success for t in got.trajectories] == [True, False]
    assert [t.reward for t in got.trajectories] == [1.0, 0.0]
    assert texts(policy, got.trajectories[0]) == [(KITCHEN, "look"), ("Nothing.", "go to fridge 1")]
    assert got.trajectories[0].final_observation == "Shut."


def test_what_nobody_recorded_is_said(read, policy):
    (t,) = read([CHAT]).trajectories
    assert t.protocol["tokens"] == "retokenized" and t.protocol["tokenizer"] == "bytes"
    assert (t.protocol["format"], t.protocol["source"], t.protocol["record"]) == ("messages", "rollouts.txt", 1)
    assert t.protocol["unknown"] == ["behaviour_logp", "policy_version", "seed", "reward", "success"]
    assert t.protocol["unknown_tokens"] == {"observations": 0.0, "responses": 0.0}
    assert len(t.behaviour_logp) == len(t.response_ids) > 1 and all(map(math.isnan, t.behaviour_logp))
    assert t.policy_version == "unknown" and t.success is False
    known = read([CHAT | {"reward": 2, "success": True}]).trajectories[0]
    assert known.protocol["unknown"] == ["behaviour_logp", "policy_version", "seed"]
    with pytest.raises(PolicyError, match="its outcome is not known"):
        policy.analysis_ids(t)
    assert policy.analysis_ids(known)


# --- broken rows

GOOD = {"messages": [user("Hi."), agent("the good one")]}


def chat(*messages, **more):
    return {"messages": list(messages)} | more


DEEP = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
BAD_CHATS = {
    "no messages": ({"messages": []}, "no response"),
    "messages is null": ({"messages": None}, "messages should be a list"),
    "messages is text": ({"messages": "hello"}, "messages should be a list"),
    "messages is an object": ({"messages": {"role": "user"}}, "messages should be a list"),
    "messages missing": ({"conversation": []}, "messages should be a list"),
    "a message is null": (chat(user("a"), None), "a record should be an object"),
    "a message is text": (chat("a", "b"), "a record should be an object"),
    "no role": (chat({"content": "a"}), "role should be text"),
    "role is a number": (chat({"role": 1, "content": "a"}), "role should be text"),
    "unknown role": (chat({"role": "critic", "content": "a"}), "unknown role"),
    "no content": (chat({"role": "user"}, agent("b")), "a response to nothing"),
    "content is a number": (chat(user(3), agent("b")), "content should be text"),
    "content is false": (chat(user(False), agent("b")), "content should be text"),
    "content is an object": (chat(user({}), agent("b")), "content should be text"),
    "an image": (chat(user([{"type": "image_url", "image_url": {"url": "x"}}]), agent("b")), "a part of the content"),
    "a part without text": (chat(user([{"type": "text"}]), agent("b")), "text should be text"),
    "a part that is text": (chat(user(["a"]), agent("b")), "a part of the content"),
    "a part that is null": (chat(user([None]), agent("b")), "a part of the content"),
    "assistant first": (chat(agent("a"), user("b"), agent("c")), "a response to nothing"),
    "two assistants in a row": (chat(user("a"), agent("b"), agent("c")), "a response to nothing"),
    "system only": (chat({"role": "system", "content": "a"}), "no response"),
    "user only": (chat(user("a")), "no response"),
    "empty observation": (chat(user(" \n"), agent("a")), "a response to nothing"),
    "empty response": (chat(user("a"), agent("")), "empty response"),
    "response of blanks": (chat(user("a"), agent(" \u3000\n")), "empty response"),
    "response is null": (chat(user("a"), agent(None)), "empty response"),
    "tool_calls is an object": (chat(user("a"), agent("", tool_calls={})), "tool_calls should be a list"),
    "a tool call is text": (chat(user("a"), agent("", tool_calls=["f"])), "a tool call should be an object"),
    "a tool call without function": (chat(user("a"), agent("", tool_calls=[{}])), "function should be an object"),
    "a tool call without name": (chat(user("a"), agent("", tool_calls=[{"function": {}}])), "name should be text"),
    "reasoning is a number": (chat(user("a"), agent("b", reasoning_content=1)), "reasoning_content should be text"),
    "lone surrogate": (chat(user("a"), agent("\ud800")), "lone surrogates"),
    "lone surrogate at the end": (chat(user("a"), agent("b"), user("\udfff")), "lone surrogates"),
    "reward is text": (GOOD | {"reward": "1"}, "reward should be a finite number"),
    "reward is a list": (GOOD | {"reward": [1]}, "reward should be a finite number"),
    "reward is NaN": (GOOD | {"reward": math.nan}, "reward should be a finite number"),
    "reward is infinite": (GOOD | {"score": -math.inf}, "score should be a finite number"),
    "reward is endless": (GOOD | {"score": 10**3000}, "score should be a finite number"),
    "success is text": (GOOD | {"success": "yes"}, "success should be a finite number"),
    "success is a half": (GOOD | {"won": 0.5}, "success should be true or false"),
    "too long": (chat(user("a" * 3000), agent("b")), "context too long"),
    "far too long": (chat(user("a" * (MAX_CHARACTERS + 1)), agent("b")), "too much text"),
    "an object of another kind": ({"id": 1}, "messages should be a list"),
    "an empty object": ({}, "messages should be a list"),
    "null": (None, "a record should be an object"),
    "a number": (7, "a record should be an object"),
    "text": ("hello", "a record should be an object"),
    "an empty list": ([], "no response"),
}
BAD_LINES = {
    "a torn line": (b'{"messages": [{"role": "user", "con', "not JSON"),
    "not UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
    "UTF-16": ('{"messages": []}'.encode("utf-16-le"), "not JSON"),
    "plain text": (b"INFO: done", "not JSON"),
    "two objects": (json.dumps(GOOD).encode() * 2, "not JSON"),
    "a NUL": (b"\x00", "not JSON"),
    "single quotes": (b"{'messages': []}", "not JSON"),
    "a control character": (b'{"messages": "\x01"}', "not JSON"),
    "nested too deeply": (DEEP.encode(), "nested too deeply"),
    "a long integer": (b'{"messages": ' + b"9" * 5000 + b"}", "not JSON"),
    "a BOM inside": (codecs.BOM_UTF8 + json.dumps(GOOD).encode(), "not JSON"),
}
BAD_VERL = {
    "input is null": ({"input": None, "output": "b"}, "input should be text"),
    "no output": ({"input": "a"}, "output should be text"),
    "output is a list": ({"input": "a", "output": ["b"]}, "output should be text"),
    "empty input": ({"input": "", "output": "b"}, "a response to nothing"),
    "empty output": ({"input": "a", "output": "\n"}, "empty response"),
    "score is NaN": ({"input": "a", "output": "b", "score": math.nan}, "score should be a finite number"),
    "score is a list": ({"input": "a", "output": "b", "score": [1, 0]}, "score should be a finite number"),
    "a tool's result": ({"input": "a", "output": "b<tool_response>c</tool_response>d"}, "text that was not sampled"),
    "a search result": ({"input": "a", "output": "b <information>c</information> d"}, "text that was not sampled"),
    "another turn": ({"input": "a", "output": "b\nuser\nc\nassistant\nd"}, "text that was not sampled"),
    "a list": (["a", "b"], "a record should be an object"),
}


def held(got):
    assert [texts_of(t) for t in got.trajectories] == ["the good one"]
    return [(s.record, s.reason) for s in got.skipped]


def texts_of(trajectory):
    return trajectory.turns[-1].action


@pytest.mark.parametrize(("row", "reason"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_a_broken_chat_is_skipped_and_told(read, row, reason):
    (skipped,) = held(read([GOOD, row]))
    assert skipped[0] == 2 and reason in skipped[1]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_broken_line_is_skipped_and_told(read, line, reason):
    good = json.dumps(GOOD).encode()
    assert held(read(good + b"\r\n\n" + line)) == [(3, reason)]  # the last line, perhaps torn
    assert held(read(b"{\n" + line + b"\n" + good)) == [(1, "not JSON"), (2, reason)]


@pytest.mark.parametrize(("row", "reason"), BAD_VERL.values(), ids=BAD_VERL)
def test_a_broken_verl_row_is_skipped_and_told(read, row, reason):
    got = read([{"input": "a", "output": "the good one"}, row])
    (skipped,) = held(got)
    assert skipped[0] == 2 and reason in skipped[1] and sum(got.reasons.values()) == 1


def gone(name, n=1):
    return {key: value for key, value in step(n).items() if key != name}


BAD_STEPS = {
    "duplicate steps": ([step(0), step(1), step(1)], "duplicate step numbers"),
    "a missing step": ([step(0), step(2)], "missing steps"),
    "the first steps missing": ([step(2), step(3)], "missing steps"),
    "a step without number": ([step(0), gone("step_num")], "step numbers should be integers"),
    "a number that is text": ([step(0), step("1")], "step numbers should be integers"),
    "a number that is true": ([step(0), step(True)], "step numbers should be integers"),
    "a number that is a fraction": ([step(0), step(1.0)], "step numbers should be integers"),
    "verl's step, twice": ([gone("step_num") | {"step": n} for n in (0, 1, 1)], "duplicate step numbers"),
    "fewer than the episode": ([step(0, episode_lengths=3), step(1, episode_lengths=3)], "missing steps"),
    "no prompt": ([step(0), gone("prompt")], "prompt or input should be text"),
    "no response": ([step(0), gone("response")], "response or output should be text"),
    "an empty response": ([step(0), step(1, response=" ")], "empty response"),
    "no observation": ([step(0), step(1, prompt="Act now.")], "a response to nothing"),
    "an observation that is null": ([step(0, anchor_obs=None)], "anchor_obs should be text"),
    "a reward that is text": ([step(0, rewards="high")], "rewards should be a finite number"),
    "nothing but padding": ([step(0, active_masks=False)], "no response"),
}


@pytest.mark.parametrize(("rows", "reason"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_broken_episode_is_skipped_and_told(read, rows, reason):
    good = step(0, "t9", action="look", response="the good one", prompt="Your current observation is: x")
    assert held(read([good, *rows])) == [(2, reason)]


@pytest.mark.parametrize("uid", [None, 3, ["a"], {}])
def test_a_step_of_no_episode_is_skipped_and_told(read, uid):
    good = step(0, response="the good one", prompt="Your current observation is: x")
    rows = [good, step(0, uid), {"prompt": "a"}, "text"]
    assert [n for n, _ in held(read(rows))] == [2, 3, 4]


BAD_TEXT = {
    "two actions in a row": ("You see a mug.\n> look\n> go\nDone.", "a response to nothing"),
    "an action first": ("> look\nA mug.", "a response to nothing"),
    "an empty action": ("You see a mug.\n>\nA mug.\n> go\nDone.", "empty response"),
    "only a mark": ("You see a mug.\n>", "no response"),
}


@pytest.mark.parametrize(("text", "reason"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_a_broken_transcript_is_skipped_and_told(read, text, reason):
    good = "A door.\n> the good one\nOpen.\n----------\n"
    assert held(read(good + text)) == [(2, reason)]


NOTHING = {
    "empty": b"",
    "blank": b" \r\n\t\n",
    "a BOM": codecs.BOM_UTF8,
    "prose": b"Nothing to see.\nNo action in it.",
    "binary": bytes(range(256)),
    "UTF-16": codecs.BOM_UTF16_LE + "> look".encode("utf-16-le"),
    "latin-1 transcript": "Une pièce.\n> ouvrir\nBien.".encode("latin-1"),
    "a number": b"3",
    "null": b"null",
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of numbers": b"[1, 2]",
    "a torn object": b'{"messages": [',
    "another schema": b'{"conversations": [{"from": "human", "value": "a"}]}',
    "a Parquet file": b"PAR1\x00\x15\x04PAR1",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", NOTHING.values(), ids=NOTHING)
def test_an_unusable_file_is_one_error(read, content):
    with pytest.raises(DataError, match="no rollouts in a known format") as stop:
        read(content)
    assert "rollouts.txt" in str(stop.value) and len(str(stop.value).splitlines()) == 1 and len(str(stop.value)) < 600


def test_an_error_gives_the_first_reasons(read):
    with pytest.raises(
        DataError, match="read as messages; record 1: no response; record 2: messages should be a list"
    ):
        read([{"messages": []}, {"messages": 3}])
    with pytest.raises(DataError, match=r"context too long \(3005 tokens, the model reads 2048\)"):
        read([chat(user("a" * 3000), agent("b"))])
    with pytest.raises(DataError, match="read as verl"):
        read([GOOD], format="verl")
    with pytest.raises(ValueError, match="unknown format 'chat'; choose one of messages, steps, verl, react"):
        read([GOOD], format="chat")


@pytest.mark.parametrize(
    "text", ["<" + " " * 149_999, "<think>", ">" * 9 + "\n", "'", "\n", " ", "-", "user\n", "> \n"]
)
def test_hostile_text_takes_no_time(read, text):
    text *= 150_000 // len(text)
    begin = time.perf_counter()
    for content in (
        [chat(user("a"), agent(text))],
        [{"traj_uid": "t", "prompt": text, "response": "a"}],
        [{"input": "a", "output": text}],
        text,
        "A.\n> " + text,
    ):
        with contextlib.suppress(DataError):
            read(content)
    assert time.perf_counter() - begin < 5


def test_recognise(tmp_path):
    path = tmp_path / "any.txt"
    rows = {"messages": GOOD, "verl": {"input": "", "output": ""}, "steps": step(0), None: {"id": 1, "turns": []}}
    for format, row in rows.items():
        path.write_text("broken\n" + json.dumps(row))
        assert recognise(path) == format
    path.write_text(REACT)
    assert recognise(path) == "react"


# --- any text

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(str.strip)
ANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.booleans())
def test_any_messages_read_back_with_the_same_text(read, policy, pairs, escaped):
    messages = [message for seen, answer in pairs for message in (user(seen), agent(answer))]
    content = json.dumps({"messages": messages}, ensure_ascii=escaped).encode()
    (t,) = read(content).trajectories
    assert texts(policy, t) == pairs


PIECES = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"\n",
        b"\r\n",
        b"> ",
        b"Act 1: a\n",
        b"\xff",
        b"null",
        b"1e999",
        b"\\ud800",
    ]
    + [
        f'"{word}"'.encode()
        for word in ("messages", "role", "user", "assistant", "content", "input", "output", "traj_uid")
    ]
    + [json.dumps(row).encode() for row in (GOOD, step(0), {"input": "a", "output": "b"})]
)


@ANY
@given(st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=12).map(b"".join)))
def test_any_bytes_are_read_or_a_data_error(read, policy, content):
    for format in (None, "messages", "verl", "steps", "react"):
        try:
            got = read(content, format=format)
        except DataError:
            continue
        assert all(policy.lay_out(t).ids for t in got.trajectories)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
KEYS = (
    *(
        "messages",
        "traj_uid",
        "input",
        "output",
        "prompt",
        "response",
        "step",
        "step_num",
        "uid",
        "anchor_obs",
        "reward",
    ),
    *("success", "rewards", "episode_lengths", "active_masks"),
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "reasoning_content"]), VALUES)
    | st.just(user("a"))
    | st.just(agent("b")),
    max_size=3,
)


@ANY
@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES | MESSAGES), min_size=1, max_size=4),
    st.sampled_from(KEYS[:3]),
)
def test_any_fields_are_read_or_a_data_error(read, rows, key):
    rows = [row | {key: row.get(key, "a")} for row in rows]
    with contextlib.suppress(DataError):
        read(rows)


# --- what is done with them


def test_tokens_are_the_policys_own_and_made_once(read, policy, tmp_path):
    (t,) = read([chat(user("<user> hi <end>"), agent("a<end>b"), user("more"), agent("c"))]).trajectories
    assert t.turns[0].context_ids == tuple(policy.open_ids("<user> hi <end>"))
    assert t.turns[1].context_ids == tuple(policy.turn_ids("more", 1))
    assert t.response_ids.count(policy.end_id) == 2  # a marker in the text is text
    for suffix in (".parquet", ".jsonl"):
        write_trajectories(tmp_path / f"kept{suffix}", [t])
        (back,) = read_trajectories(tmp_path / f"kept{suffix}")
        assert all(map(math.isnan, back.behaviour_logp)) and math.isnan(back.reward)
        assert (back.response_ids, back.protocol, back.turns[0].context_ids) == (
            t.response_ids,
            t.protocol,
            t.turns[0].context_ids,
        )


def test_rescoring_needs_no_behaviour(read, policy):
    trajectories = read([GOOD, CHAT]).trajectories
    skills = [Skill("Open it first."), None]
    one, none = rescore(policy, trajectories, skills)
    assert one.skill_tokens > 0 and all(map(math.isfinite, one.student_logp + one.delta))
    assert any(one.delta) and none.reason == "no skill"
    assert contrast(policy, trajectories, skills)[0] is not None


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.no_closed_form is None])
def test_an_unknown_behaviour_never_counts_as_zero(name):
    row: dict[str, Any] = {"student_logp": torch.tensor([[-1.0, -2.0]]), "teacher_logp": torch.tensor([[-0.5, -2.5]])}
    row |= {"advantage": torch.tensor([1.0]), "response_mask": torch.ones(1, 2, dtype=torch.bool)}
    unknown = torch.full((1, 2), math.nan)
    zero = token_weights(name, **row, behaviour_logp=torch.zeros(1, 2))
    weights = token_weights(name, **row, behaviour_logp=unknown)
    assert token_weights(name, **row).isfinite().all()  # None means o = s
    method = METHODS[name]
    if method.policy_gradient or method.term == "skill_sd":
        assert weights.isnan().all()
    else:  # the behaviour has no part in it
        assert torch.equal(weights, zero) and torch.equal(weights, token_weights(name, **row))


def test_losses_of_an_unknown_behaviour_are_not_numbers():
    s, k, mask = torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.ones(1, 1, dtype=torch.bool)
    unknown = torch.full((1, 1), math.nan)
    assert policy_loss(s, unknown, torch.tensor([1.0]), mask).isnan().all()
    assert distill_loss(s, k, mask, kind="skill_sd", behaviour_logp=unknown).isnan().all()


def test_training_refuses_them(read, tiny, monkeypatch):
    (t,) = read(EPISODE, tiny).trajectories
    monkeypatch.setattr(train, "collect", lambda *args, **options: [t, t])
    env = make("household")
    config = Stage2Config(method="grpo", updates=1, tasks=1, group=2)
    with pytest.raises(
        RunError, match=r"'rollouts.txt:1': behaviour log-probabilities .* unknown \(tokens: retokenized"
    ):
        stage2(tiny.clone(), env, env.panel("train")[:1], config)


# --- household-tiny

EPISODE = f"""{KITCHEN}
> go to toaster 1
On the toaster 1, you see a bread 1.
> take bread 1 from toaster 1
You pick up the bread 1 from the toaster 1.
> go to fridge 1
The fridge 1 is closed.
> open fridge 1
You open the fridge 1. The fridge 1 is open. In it, you see nothing.
> move bread 1 to fridge 1
You move the bread 1 to the fridge 1."""


def test_household_tiny_scores_a_transcript_under_a_skill(read, tiny):
    (t,) = read(EPISODE, tiny).trajectories
    assert [tiny.decode(turn.response_ids) for turn in t.turns][:2] == [
        "go to toaster 1",
        "take bread 1 from toaster 1",
    ]
    assert t.protocol["unknown_tokens"]["responses"] == 0 and t.protocol["unknown_tokens"]["observations"] < 0.1
    right = Skill("find the thing, take it, then go to the place and move it there.")
    (shift,) = rescore(tiny, [t], [right])
    assert shift.response_ids == t.response_ids and shift.skill_tokens > 5 and all(shift.mask)
    assert all(math.isfinite(x) and x <= 0 for x in shift.student_logp + shift.teacher_logp)
    assert max(map(abs, shift.delta)) > 0.01
    assert sum(shift.student_logp) / len(shift.student_logp) > -3  # it reads the commands as commands


def test_words_without_a_token_are_counted(read, tiny):
    some = EPISODE.replace("go to toaster 1\n", "go to spaceship 1\n").replace(
        "bread 1 from the", "bread 1, humming, from the"
    )
    (t,) = read(some, tiny).trajectories
    responses = [i for turn in t.turns for i in turn.response_ids if i != tiny.end_id]
    unknown = t.protocol["unknown_tokens"]
    assert (
        unknown["responses"] == responses.count(tiny.tokenizer.unk_token_id) / len(responses) == pytest.approx(1 / 21)
    )
    assert 0 < unknown["observations"] < 0.2
    thoughts = (
        f"{KITCHEN}\n> think: perhaps somebody hides food somewhere unexpected, who knows\nOK.\n> open fridge 1\n"
    )
    got = read(f"{EPISODE}\n-----\n{thoughts}", tiny)
    ((_, episode, reason, detail),) = got.skipped
    assert (episode, reason) == (2, "mostly unknown tokens") and "of responses" in detail
    assert got.reasons == {"mostly unknown tokens": 1}


def test_another_policys_episode_in_ones_own_tokens(policy):
    (record, *_) = read_records(data_dir() / "trajectories" / "household-right.jsonl")
    theirs = record.trajectory
    made = retokenize(theirs, policy)
    assert (made.id, made.task, made.success, made.reward) == (theirs.id, theirs.task, theirs.success, theirs.reward)
    assert [policy.decode(t.response_ids) for t in made.turns] == [t.action for t in theirs.turns]
    assert [t.observation for t in made.turns] == [t.observation for t in theirs.turns]
    assert made.response_ids != theirs.response_ids and made.protocol["played_by"] == "household-tiny"
    (shifts,) = rescore(policy, [made], [record.skill])  # its contexts are this policy's own
    assert shifts.skill_tokens > 0 and all(map(math.isnan, made.behaviour_logp))
    silent = replace(theirs, turns=())
    with pytest.raises(DataError, match="trajectory .*: no response"):
        retokenize(silent, policy)
