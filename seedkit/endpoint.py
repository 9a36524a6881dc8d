"""Hindsight skills from any OpenAI-compatible chat server: SEED's annotator, or an external analyzer in Stage 2.

One request for each different episode, `POST {base_url}/chat/completions`, asked by `analysis.analysis_messages` and
read by `analysis.parse_analysis`. The server is not trusted: every attempt has one deadline and every answer a size
limit, redirects are not followed, and only a clear configuration error or a row of failures ends the call; any other
failure is a skill with a reason. Leaves out streaming, tool calls and batch interfaces.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import aclosing
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx2
from anyio import sleep
from anyio.from_thread import start_blocking_portal
from tqdm.auto import tqdm

from seedkit.analysis import analysis_messages, parse_analysis
from seedkit.io import DataError, append_jsonl, read_jsonl
from seedkit.types import Skill, Trajectory, digest

MAX_BYTES = 1 << 20  # of an answer's body
MAX_WAIT = 60.0  # seconds that a server's Retry-After can ask for
STOP_AFTER = 20  # failed requests in a row
AGAIN = (408, 409, 425, 429)  # and 500 to 599

TIMEOUT = "timeout"
NO_CONNECTION = "no connection"
BROKEN = "broken connection"
TOO_LARGE = "answer too large"
NOT_COMPLETION = "not a chat completion"
NOT_RECORDED = "not recorded"
NO_TURNS = "no turns"

_ADDRESS = "base_url should end before /chat/completions (often in /v1), and the server know the model"
_RIGHT = {
    401: "key_variable should name an environment variable that holds a key which this server accepts",
    402: "the account behind the key should be paid up",
    404: _ADDRESS,
    405: _ADDRESS,
}
_REDIRECT = "base_url should be the address that answers itself, since a key does not follow redirects"
_jitter = random.Random()
T = TypeVar("T")


class EndpointError(RuntimeError):
    """Asking further makes no sense: names the address and what would be right."""


@dataclass(frozen=True)
class Usage:
    """What an analyzer has used since it was made."""

    answered: int = 0
    """Answers that a server gave."""
    replayed: int = 0
    """Trajectories whose answer was there already, from the replay file or an earlier call."""
    unmetered: int = 0
    """Answers without token counts; with any, tokens and cost are lower bounds."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prices: tuple[float, float] | None = None
    """Of a million prompt and of a million completion tokens."""

    @property
    def cost(self) -> float | None:
        """In the currency of `prices`; None without prices."""
        if self.prices is None:
            return None
        return (self.prompt_tokens * self.prices[0] + self.completion_tokens * self.prices[1]) / 1e6


@dataclass(frozen=True)
class _Answer:
    text: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


class Failed(Exception):
    """No answer: why, whether and after how many seconds to ask again, the server's words, what would be right."""

    def __init__(self, reason: str, again: bool = False, wait: float = 0.0, words: str = "", right: str = "") -> None:
        self.reason, self.again, self.wait, self.words, self.right = reason, again, wait, words, right


class _Run:
    """How a call's requests end, in the order in which they do; `last` is the failure after which none is sent."""

    def __init__(self) -> None:
        self.heard = self.row = 0
        self.last: Failed | None = None
        self.hint = ""

    def count(self, failed: Failed) -> None:
        self.heard, self.row = self.heard + 1, self.row + 1
        hint = _hopeless(failed, self.row, none_yet=self.row == self.heard)
        if hint and self.last is None:
            self.last, self.hint = failed, hint


class EndpointAnalyzer:
    """A chat model behind an OpenAI-compatible server writes the skills.

    Args:
        base_url: what stands before `/chat/completions`, as in "http://localhost:8000/v1".
        model: its name on the server.
        key_variable: name of the environment variable that holds the key, read at each call and kept nowhere; None
            sends no key.
        temperature: of the writing; None leaves it to the server.
        max_tokens: longest answer; a longer one is cut, does not parse, and is counted. None leaves it out.
        timeout: seconds for an attempt, from connecting to the last byte.
        retries: attempts after the first, on timeouts, broken connections, 408, 409, 425, 429 and 5xx; after twice as
            long a pause each time (from about a second), and not before a server's Retry-After (at most a minute).
        concurrency: most requests under way at once.
        prices: (prompt, completion), of a million tokens.
        replay: JSONL file to which each answer is added when it arrives. A request whose answer is in it is not sent:
            requests are told apart by a hash of model, messages and parameters, and not by address.
        offline: send nothing. A request that is not in `replay` gets the reason "not recorded", not an error: the
            recording run had no skill there either where its request failed.
        max_chars: see `analysis_messages`.
        extra: more fields of the request's body.
        progress: show a bar.

    Attributes:
        usage: tokens and cost so far (`Usage`).

    Raises:
        EndpointError: for an address or key variable that cannot be used.
        DataError: for a replay file that is missing (offline) or malformed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_variable: str | None = None,
        temperature: float | None = 0.0,
        max_tokens: int | None = 1024,
        timeout: float = 120.0,
        retries: int = 4,
        concurrency: int = 8,
        prices: tuple[float, float] | None = None,
        replay: Path | str | None = None,
        offline: bool = False,
        max_chars: int = 24_000,
        extra: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> None:
        if not (timeout > 0 and retries >= 0 and concurrency >= 1):
            raise ValueError("timeout should be above 0, retries at least 0, concurrency at least 1")
        if offline and replay is None:
            raise ValueError("offline=True needs replay: the file with the answers")
        self.url, self.key_variable = address(base_url, "/chat/completions"), variable_name(key_variable)
        self.author = f"endpoint ({model})"
        self.timeout, self.retries, self.concurrency = timeout, retries, concurrency
        self.offline, self.max_chars, self.progress = offline, max_chars, progress
        self.fields = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(extra or {})}
        self.usage = Usage(prices=prices)
        self._replay = None if replay is None else Path(replay)
        self._answers = {} if self._replay is None else _recorded(self._replay, required=offline)

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """One skill a trajectory, in order.

        Episodes that read the same are asked about once, at any temperature. What was answered is kept for later
        calls, also when this one ends in an error.

        Raises:
            EndpointError: when no request can succeed (401, 402, 404, 405, a redirect, a server that cannot be
                reached) or 20 fail in a row.
        """
        requests = [self._body(t) if t.turns else None for t in trajectories]
        keys = [digest(request, 32) for request in requests]
        bodies = {k: body for k, body in zip(keys, requests, strict=True) if body and k not in self._answers}
        self.usage = replace(self.usage, replayed=self.usage.replayed + sum(k in self._answers for k in keys))
        failures = dict.fromkeys(bodies, NOT_RECORDED) if self.offline or not bodies else self._ask_all(bodies)
        skills = []
        for trajectory, key in zip(trajectories, keys, strict=True):
            if answer := self._answers.get(key):
                skill = parse_analysis(answer.text, turns=len(trajectory.turns))
            else:
                skill = Skill(reason=failures.get(key, NO_TURNS))
            skills.append(replace(skill, author=self.author, source=trajectory.id))
        return skills

    def _body(self, trajectory: Trajectory) -> dict[str, Any]:
        body = {**self.fields, "messages": analysis_messages(trajectory, max_chars=self.max_chars)}
        return {name: value for name, value in body.items() if value is not None}

    def _ask_all(self, bodies: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Asks for every body and keeps the answers; returns the reasons of those that have none."""
        secret = secret_of(self.key_variable, self.url)
        if self._replay is not None:  # before anything is paid for
            self._replay.parent.mkdir(parents=True, exist_ok=True)
            self._replay.touch()
        failures, run = {}, _Run()
        bar = tqdm(total=len(bodies), desc="hindsight", unit="answer", disable=not self.progress, leave=False)
        limits = httpx2.Limits(max_connections=self.concurrency)
        client = httpx2.AsyncClient(headers=headers(secret), timeout=None, follow_redirects=False, limits=limits)
        with bar, start_blocking_portal() as portal, portal.wrap_async_context_manager(client):
            slots = portal.call(anyio.Semaphore, self.concurrency)
            futures = {portal.start_task_soon(self._ask, client, slots, body, run): k for k, body in bodies.items()}
            for future in as_completed(futures):  # once there is no sense in asking on, the rest fails at once
                bar.update()
                try:
                    self._keep(futures[future], future.result(), secret)
                except Failed as failed:
                    failures[futures[future]] = failed.reason
        if run.last is not None:
            words = f" {_hide(run.last.words, secret)[:200]!r}" if run.last.words else ""
            raise EndpointError(f"{self.url}: {run.last.reason}{words}; {run.hint}")
        return failures

    def _keep(self, key: str, answer: _Answer, secret: str) -> None:
        answer = replace(answer, text=answer.text and _hide(answer.text, secret))
        if self._replay is not None:
            append_jsonl(self._replay, {"request": key, **vars(answer)})
        self._answers[key] = answer
        used = self.usage
        self.usage = replace(
            used,
            answered=used.answered + 1,
            unmetered=used.unmetered + (None in (answer.prompt_tokens, answer.completion_tokens)),
            prompt_tokens=used.prompt_tokens + (answer.prompt_tokens or 0),
            completion_tokens=used.completion_tokens + (answer.completion_tokens or 0),
        )

    async def _ask(
        self, client: httpx2.AsyncClient, slots: anyio.Semaphore, body: dict[str, Any], run: _Run
    ) -> _Answer:
        """One answer; once there is no sense in asking on, none."""

        async def post() -> _Answer:
            return _completion(await post_json(client, self.url, body))

        async with slots:
            try:
                answer = await insist(post, self.timeout, self.retries, hopeless=lambda: run.last is not None)
            except Failed as failed:
                if run.last is None:
                    run.count(failed)
                raise
            run.heard, run.row = run.heard + 1, 0
            return answer


async def insist(
    ask: Callable[[], Awaitable[T]], timeout: float, retries: int, hopeless: Callable[[], bool] = lambda: False
) -> T:
    """What `ask` returns, after as many attempts as it takes and are allowed.

    Args:
        timeout: seconds for an attempt.
        retries: attempts after the first, after twice as long a pause each time (from about a second).
        hopeless: asked before each attempt.

    Raises:
        Failed: the last attempt's failure.
    """
    attempt = 0
    while not hopeless():
        try:
            with anyio.fail_after(timeout):
                return await ask()
        except TimeoutError:
            failed = Failed(TIMEOUT, again=True)
        except httpx2.TransportError as error:
            reason = NO_CONNECTION if isinstance(error, httpx2.ConnectError) else BROKEN
            failed = Failed(reason, again=True, words=str(error))
        except Failed as error:
            failed = error
        if attempt >= retries or not failed.again:
            raise failed
        await sleep(failed.wait + 2 ** min(attempt, 6) * _jitter.uniform(0.5, 1.0))
        attempt += 1
    raise Failed("not asked")


async def post_json(client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> bytes:
    """The content of a server's answer, of at most MAX_BYTES.

    Raises:
        Failed: for any status but 200 to 299.
    """
    content = bytearray()
    async with client.stream("POST", url, json=body) as response, aclosing(response.aiter_raw()) as parts:
        async for part in parts:
            content += part
            if len(content) > MAX_BYTES:
                break
    status = response.status_code
    if 200 <= status < 300:
        if len(content) > MAX_BYTES:
            raise Failed(TOO_LARGE)
        return bytes(content)
    if 300 <= status < 400:
        raise Failed(f"redirected ({status})", words=response.headers.get("location", ""), right=_REDIRECT)
    raise Failed(
        f"server error ({status})" if status >= 500 else f"refused ({status})",
        again=status in AGAIN or status >= 500,
        wait=_retry_after(response.headers.get("retry-after", "")),
        words="" if status in (401, 403) else content.decode(errors="replace"),  # those two may quote the key
        right=_RIGHT.get(status, ""),
    )


def headers(secret: str) -> dict[str, str]:
    """What every request carries; nothing is compressed, so that MAX_BYTES holds."""
    return {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {secret}"} if secret else {})


def variable_name(variable: str | None) -> str | None:
    """The name of an environment variable, as it is given. Raises `EndpointError` for what may be a key itself."""
    if variable is not None and not re.fullmatch("[A-Z_][A-Z0-9_]*", variable):
        raise EndpointError("key_variable should be the NAME of an environment variable, in capitals; not a key")
    return variable


def secret_of(variable: str | None, url: str) -> str:
    """The key that an environment variable holds; "" where none is named. Raises `EndpointError`."""
    if variable is None:
        return ""
    secret = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]+", secret):
        raise EndpointError(f"{url}: the environment variable {variable} should hold an ASCII key")
    return secret


def address(base_url: str, path: str) -> str:
    """The URL of a path behind `base_url`. Raises `EndpointError` where it could carry more than an address."""
    try:
        url = httpx2.URL(base_url)
        good = url.scheme in ("http", "https") and url.host and not (url.userinfo or url.query or url.fragment)
    except httpx2.InvalidURL:
        good = False
    if not good:
        shown = re.sub("(?<=//)[^/]*@|[?#].*", "", base_url)
        raise EndpointError(f"{shown!r}: base_url should be http(s)://host/path, without user, query or fragment")
    return base_url.rstrip("/") + path


def _hopeless(failed: Failed, row: int, *, none_yet: bool) -> str:
    """What would be right, when asking on makes no sense after this failure, the last of `row` in a row."""
    if failed.reason == NO_CONNECTION and none_yet:
        return "is base_url right, and is a server running there?"
    if row >= STOP_AFTER and not failed.right:
        return f"{row} requests in a row failed; what was answered before is kept for the next call"
    return failed.right


def _recorded(path: Path, *, required: bool) -> dict[str, _Answer]:
    """The answers of a replay file by their request's hash; a torn last line is no answer."""
    if not path.exists() and not required:
        return {}
    if not path.is_file():
        raise DataError(f"{path}: should be the JSONL file that an earlier run recorded with replay=")
    fields = ("request", "text", "prompt_tokens", "completion_tokens")
    answers = {}
    for n, row in enumerate(read_jsonl(path).rows, 1):
        key, text, *counts = map(row.get, fields)
        known = row.keys() == set(fields) and isinstance(key, str) and isinstance(text, str | None)
        if not known or counts != _counts(counts):
            raise DataError(f"{path} row {n}: should hold {', '.join(fields)}, and nothing else")
        answers[key] = _Answer(text, *counts)
    return answers


def _completion(content: bytes) -> _Answer:
    try:
        value = json.loads(content)
        text = value["choices"][0]["message"]["content"]
        usage = value.get("usage")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Failed(NOT_COMPLETION) from None
    if not isinstance(text, str | None):
        raise Failed(NOT_COMPLETION)
    usage = usage if isinstance(usage, dict) else {}
    return _Answer(text, *_counts([usage.get("prompt_tokens"), usage.get("completion_tokens")]))


def _counts(values: list[Any]) -> list[int | None]:
    """What can be a number of tokens; None for anything else."""
    return [value if type(value) is int and 0 <= value < 1 << 40 else None for value in values]


def _retry_after(value: str) -> float:
    """Seconds to wait, from a number or a date; 0 where it says nothing that can be used."""
    try:
        number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", value)
        seconds = float(value) if number else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), MAX_WAIT)


def _hide(text: str, secret: str) -> str:
    """The text without a key that a server put into it. Shorter keys are stand-ins such as "EMPTY"."""
    return text.replace(secret, "[key]") if len(secret) >= 12 else text
