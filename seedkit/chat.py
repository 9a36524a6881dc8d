"""The prompt layout of a chat model, read off its tokenizer's own chat template.

The template is rendered twice with marked texts and cut at the marks: what stands before the first message, between a
response and the next message, and before a response. From then on turns are written one by one and never again
rewritten, also where the template itself would drop an earlier turn's reasoning. Leaves out: tool roles, images.
"""

from __future__ import annotations

from typing import Any

from seedkit.policy import Layout, PolicyError

SYSTEM = "You play a text game. You are told what you see; reply with your next action and nothing else."
SKILL = "\n\nAdvice for this kind of task:\n"
ANALYZE = (
    "\n\nThe episode is over. Write what to do in later tasks of this kind, in one sentence, as "
    '{"episode_skill": "..."} and nothing else. Outcome of the episode: '
)
_FIRST, _SAID, _NEXT = "FIRSTMESSAGE", "RESPONSE", "NEXTMESSAGE"


def chat_layout(tokenizer: Any, *, system: str = SYSTEM, thinking: bool = False) -> Layout:
    """How an episode is written for a chat model: the task is its first user message, an action its response.

    Args:
        tokenizer: with a chat template.
        system: the system message.
        thinking: for templates that know `enable_thinking`: False has the model answer without reasoning first.

    Raises:
        PolicyError: a tokenizer without a template, or one whose turns cannot be written one by one.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PolicyError(
            "the tokenizer has no chat template and the folder no layout.json, so it is not known how to write a turn"
        )

    def render(*messages: tuple[str, str]) -> str:
        told = [{"role": role, "content": text} for role, text in (("system", system), *messages)]
        try:
            return tokenizer.apply_chat_template(
                told, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
        except Exception as error:  # templates are programs of their own and raise what they like
            raise PolicyError(f"the chat template cannot write system, user, assistant, user ({error})") from error

    once = render(("user", _FIRST))
    twice = render(("user", _FIRST), ("assistant", _SAID), ("user", _NEXT))
    for text, marks in ((once, (_FIRST,)), (twice, (_FIRST, _SAID, _NEXT))):
        if [text.count(mark) for mark in marks] != [1] * len(marks) or system.strip() not in text:
            raise PolicyError("the chat template does not write every message once and unchanged")
    begin, request = once.split(_FIRST)
    between = twice.split(_SAID)[1].split(_NEXT)
    if not twice.startswith(begin) or between[1] != request:
        raise PolicyError("the chat template writes a message differently when others follow it")
    ids = tokenizer.encode(between[0], add_special_tokens=False)
    end = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    if not ids or ids[0] not in tokenizer.all_special_ids or not between[0].startswith(end):
        raise PolicyError(f"the chat template does not end a response with a special token, but {between[0]!r}")
    return Layout(begin, between[0].removeprefix(end), request, end, SKILL, ANALYZE)
