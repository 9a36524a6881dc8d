"""A chat server that is slow, rude and wrong by turns: every trajectory gets its own skill, or a reason."""

import asyncio
import dataclasses
import functools
import gzip
import json
import logging
import random
import socket
import ssl
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from seedkit import endpoint
from seedkit.analyzer import Analyzer, EndpointAnalyzer, reasons
from seedkit.endpoint import EndpointError
from seedkit.io import DataError, read_jsonl
from seedkit.types import Skill, Task, Trajectory, Turn

KEY = "sk-very-secret-0123456789"
GOOD = json.dumps({"episode_skill": "Look first."})


def episode(number):
    turn = Turn(f"Your task is to: find thing{number}.", ("look",), (1,), (2,), (-0.5,), "look", True)
    return Trajectory(
        f"t{number}/0.0", Task(f"t{number}", "x", "train", "pick"), (turn,), False, 0.0, "v", 0, "Dark."
    )


def episodes(count):
    return [episode(n) for n in range(count)]


def completion(content, **usage):
    value = {"choices": [{"message": {"role": "assistant", "content": content}}]}
    return json.dumps(value | ({"usage": usage} if usage else {})).encode()


class Handler(BaseHTTPRequestHandler):
    """Says what the test's `script` has it say; everything that is asked is written down."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms
    server: "Server"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(body["messages"][1]["content"].split("find thing")[1].split(".")[0])
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body, number))
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
        try:
            self.server.script(self, number)
        except OSError:  # the client has had enough
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def say(self, content=b"", status=200, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.plays(lambda handler, number: handler.say(completion(GOOD)))

    def plays(self, script):
        self.script, self.asked, self.busy, self.most = script, [], 0, 0

    @property
    def numbers(self):
        return Counter(number for *_, number in self.asked)

    def handle_error(self, request, client_address):
        pass


@pytest.fixture(scope="module")
def running():
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def client():
    """The client with certificates that are read once, not at each call."""
    return functools.partial(endpoint.httpx2.AsyncClient, verify=ssl.create_default_context())


@pytest.fixture
def server(running, client, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(endpoint.httpx2, "AsyncClient", client)
    running.plays(lambda handler, number: handler.say(completion(GOOD)))
    return running


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The seconds that would have been slept."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(endpoint, "sleep", sleep)
    return slept


def analyzer(server, **options):
    return EndpointAnalyzer(server.url, "m", **{"retries": 1, "timeout": 20.0} | options)


def first_then_good(*first):
    """A script: each trajectory's n-th request is met with the n-th of these, and with a good answer afterwards."""
    seen = Counter()

    def script(handler, number):
        step = seen[number]
        seen[number] += 1
        first[step](handler) if step < len(first) else handler.say(completion(GOOD))

    return script


def says(content=b"", status=200, **headers):
    return lambda handler: handler.say(content, status, **headers)


# --- one answer -----------------------------------------------------------------------------------------------------


def test_it_asks_and_reads_the_answer(server):
    asking = analyzer(server, max_tokens=99, extra={"seed": 3, "temperature": None})
    assert isinstance(asking, Analyzer)
    (skill,) = asking.write_skills([episode(7)])
    assert skill == Skill("Look first.", author="endpoint (m)", source="t7/0.0")
    ((path, headers, body, _),) = server.asked
    assert path == "/v1/chat/completions"
    assert headers["Content-Type"] == "application/json"
    assert body.keys() == {"model", "messages", "max_tokens", "seed"}
    assert (body["model"], body["max_tokens"], body["seed"]) == ("m", 99, 3)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert "find thing7" in body["messages"][1]["content"]


def test_temperature_is_zero_unless_told_otherwise(server):
    analyzer(server).write_skills([episode(0)])
    analyzer(server, temperature=0.7).write_skills([episode(0)])
    assert [body["temperature"] for _, _, body, _ in server.asked] == [0.0, 0.7]


def test_nothing_to_ask(server):
    assert analyzer(server).write_skills([]) == []
    (skill,) = analyzer(server).write_skills([dataclasses.replace(episode(0), turns=())])
    assert (skill.reason, skill.source) == ("no turns", "t0/0.0")
    assert not server.asked


def test_steps_are_checked_against_the_episode(server):
    server.plays(lambda h, n: h.say(completion(json.dumps({"episode_skill": "a", "step_skills": {str(n): "b"}}))))
    assert [s.reason for s in analyzer(server).write_skills(episodes(2))] == [None, "no such step"]


def test_it_works_where_an_event_loop_runs(server):
    """As in a notebook's cell."""

    async def cell():
        return analyzer(server).write_skills(episodes(2))

    assert reasons(asyncio.run(cell())) == {"ok": 2}


def test_progress(server, capsys):
    analyzer(server).write_skills(episodes(1))
    assert capsys.readouterr().err == ""
    analyzer(server, progress=True).write_skills(episodes(2))
    assert "hindsight" in capsys.readouterr().err


# --- hostile servers


def close(handler):
    handler.close_connection = True


def cut_short(handler):
    handler.say(completion(GOOD)[:-9], Content_Length="5000")
    close(handler)


def raw(data):
    def reply(handler):
        handler.wfile.write(data)
        close(handler)

    return reply


def endless(handler):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for _ in range(100_000):
        handler.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


BOMB = gzip.compress(b" " * 50_000_000 + completion(GOOD))
CASES = {
    # 200, but no chat completion
    "a web page": (says(b"<html>Welcome</html>", Content_Type="text/html"), "not a chat completion", 1),
    "no body": (says(), "not a chat completion", 1),
    "no content": (says(status=204), "not a chat completion", 1),
    "broken JSON": (says(completion(GOOD)[:-3]), "not a chat completion", 1),
    "a list": (says(b"[]"), "not a chat completion", 1),
    "null": (says(b"null"), "not a chat completion", 1),
    "an error in 200": (says(b'{"error": {"message": "no"}}'), "not a chat completion", 1),
    "no choices": (says(b'{"choices": []}'), "not a chat completion", 1),
    "null choices": (says(b'{"choices": null}'), "not a chat completion", 1),
    "choices in text": (says(b'{"choices": "abc"}'), "not a chat completion", 1),
    "choices in an object": (says(b'{"choices": {"0": 1}}'), "not a chat completion", 1),
    "no message": (says(b'{"choices": [{"text": "a"}]}'), "not a chat completion", 1),
    "null message": (says(b'{"choices": [{"message": null}]}'), "not a chat completion", 1),
    "no content key": (says(b'{"choices": [{"message": {}}]}'), "not a chat completion", 1),
    "content in parts": (says(completion([{"type": "text", "text": GOOD}])), "not a chat completion", 1),
    "a number as content": (says(completion(7)), "not a chat completion", 1),
    "an abyss": (says(b"[" * 200_000), "not a chat completion", 1),
    "a number without end": (says(b'{"choices": ' + b"1" * 5000 + b"}"), "not a chat completion", 1),
    "not UTF-8": (says(b'{"choices": "\xff\xfe'), "not a chat completion", 1),
    "a stream of events": (says(b"data: {}\n\n", Content_Type="text/event-stream"), "not a chat completion", 1),
    "compressed unasked": (says(BOMB, Content_Encoding="gzip"), "not a chat completion", 1),
    "a huge body": (says(b" " * 3_000_000), "answer too large", 1),
    "a body without end": (endless, "answer too large", 1),
    # a chat completion whose text is no skill
    "null text": (says(completion(None)), "not text", 1),
    "empty text": (says(completion("")), "empty", 1),
    "prose": (says(completion("Sure! Here it is.")), "not JSON", 1),
    "cut text": (says(completion(GOOD[:-4])), "truncated", 1),
    "control characters": (says(completion('{"episode_skill": "a\\u0007b"}')), "control character", 1),
    "raw control characters": (says(completion('{"episode_skill": "a\x1b[2Jb"}')), "control character", 1),
    "half a character": (says(completion('{"episode_skill": "a\ud800b"}')), "lone surrogate", 1),
    "a long text": (says(completion(json.dumps({"episode_skill": "word " * 1000}))), "too long", 1),
    # refused for good
    "bad request": (says(b"no", 400), "refused (400)", 1),
    "forbidden": (says(b"no", 403), "refused (403)", 1),
    "too long a request": (says(b"no", 413), "refused (413)", 1),
    "unprocessable": (says(b"no", 422), "refused (422)", 1),
    "a huge refusal": (says(b" " * 3_000_000, 400), "refused (400)", 1),
    # worth another attempt
    "request timeout": (says(b"", 408), "refused (408)", 2),
    "conflict": (says(b"", 409), "refused (409)", 2),
    "too early": (says(b"", 425), "refused (425)", 2),
    "too many": (says(b"", 429), "refused (429)", 2),
    "server error": (says(b"", 500), "server error (500)", 2),
    "overloaded": (says(b"", 503), "server error (503)", 2),
    "an unknown error": (says(b"", 599), "server error (599)", 2),
    "hangs up": (close, "broken connection", 2),
    "hangs up half way": (cut_short, "broken connection", 2),
    "not HTTP": (raw(b"220 smtp ready\r\n\r\n"), "broken connection", 2),
    "a bad chunk": (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "broken connection", 2),
    "a bad length": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"), "broken connection", 2),
    "headers without end": (raw(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 40_000), "broken connection", 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_a_reason_and_stays_where_it_is(server, case):
    """The one in the middle fails, after as many attempts as make sense; its neighbours do not notice."""
    reply, reason, attempts = CASES[case]
    server.plays(lambda handler, number: reply(handler) if number == 1 else handler.say(completion(GOOD)))
    skills = analyzer(server).write_skills(episodes(3))
    assert [skill.reason for skill in skills] == [None, reason, None]
    assert [skill.source for skill in skills] == ["t0/0.0", "t1/0.0", "t2/0.0"]
    assert not skills[1].ok
    assert server.numbers == {0: 1, 1: attempts, 2: 1}


ODD_BUT_GOOD = {
    "wrong content type": says(completion(GOOD), Content_Type="text/html; charset=latin-1"),
    "no content type": says(completion(GOOD)),
    "bad cookies": says(completion(GOOD), Set_Cookie="=;;; expires=never; Max-Age=x; domain=.com"),
    "headers in no encoding": says(completion(GOOD), X_Odd="\xe9\xff"),
    "other fields": says(json.dumps({**json.loads(completion(GOOD)), "id": None, "choices2": []}).encode()),
    "spaces around": says(b"\r\n " + completion(GOOD) + b"\n\n"),
    "Created": says(completion(GOOD), 201),
}


@pytest.mark.parametrize("case", ODD_BUT_GOOD)
def test_what_does_no_harm_is_let_pass(server, case):
    server.plays(lambda handler, number: ODD_BUT_GOOD[case](handler))
    assert reasons(analyzer(server).write_skills(episodes(1))) == {"ok": 1}


def drips(start, drop):
    """One drop after the other, each long before any read would time out."""

    def reply(handler):
        handler.wfile.write(start)
        for _ in range(100):
            handler.wfile.write(drop)
            time.sleep(0.03)

    return reply


SLOW = {
    "says nothing": lambda handler: (time.sleep(0.8), close(handler)),
    "drips headers": drips(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "drips a header": drips(b"HTTP/1.1 200 OK\r\nX-A: ", b"b"),
    "drips the body": drips(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b" "),
    "drips an error": drips(b"HTTP/1.1 500 No\r\nContent-Length: 5000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("case", SLOW)
def test_an_attempt_has_one_deadline(server, case):
    server.plays(lambda handler, number: SLOW[case](handler) if number == 0 else handler.say(completion(GOOD)))
    started = time.monotonic()
    skills = analyzer(server, timeout=0.4, retries=0).write_skills(episodes(1))
    assert time.monotonic() - started < 2
    assert skills[0].reason == "timeout"
    assert reasons(analyzer(server).write_skills([episode(1)])) == {"ok": 1}  # the next call is as good as new


# --- attempts


def test_attempts_end_with_the_first_answer(server, pauses):
    server.plays(first_then_good(says(b"", 503), close, says(b"", 429)))
    assert reasons(analyzer(server, retries=5).write_skills(episodes(1))) == {"ok": 1}
    assert server.numbers == {0: 4}
    for n, pause in enumerate(pauses):  # 1, 2, 4 s, shortened by up to a half
        assert 0.5 * 2**n <= pause <= 2**n
    assert len(pauses) == 3


def test_pauses_differ(server, pauses):
    server.plays(lambda handler, number: handler.say(b"", 503))
    analyzer(server, retries=1).write_skills(episodes(8))
    assert len(set(pauses)) == 8


def test_pauses_do_not_grow_for_ever(server, pauses):
    server.plays(lambda handler, number: handler.say(b"", 503))
    analyzer(server, retries=9).write_skills(episodes(1))
    assert max(pauses) <= 64


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        (30.0, 28, 30),
        ("999999999", 60, 60),
        (1e6, 60, 60),
        ("1e999", 0, 0),
        ("nan", 0, 0),
        ("-5", 0, 0),
        (-1e6, 0, 0),
        ("soon", 0, 0),
        ("", 0, 0),
        ("Mon, 99 Jan 99999 99:99:99 GMT", 0, 0),
        ("٣", 0, 0),
    ],
)
def test_retry_after(server, pauses, value, least, most):
    """A number of seconds, or a date so many seconds from now."""
    value = value if isinstance(value, str) else formatdate(time.time() + value, usegmt=True)
    answer = (
        b"HTTP/1.1 429 Slow down\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: "
        + value.encode()
        + b"\r\n\r\n"
    )
    server.plays(first_then_good(raw(answer)))
    assert reasons(analyzer(server).write_skills(episodes(1))) == {"ok": 1}
    (pause,) = pauses
    assert least + 0.5 <= pause <= most + 1


# --- what no other request can mend


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 401, 402, 404, 405])
def test_a_permanent_failure_stops_at_once(server, status):
    server.plays(lambda h, n: h.say(b"gone\x1b[2J" * 100, status, Location=f"{server.url}/elsewhere/{KEY}"))
    with pytest.raises(EndpointError) as caught:
        analyzer(server, concurrency=1).write_skills(episodes(50))
    message = str(caught.value)
    assert f"{server.url}/chat/completions: " in message
    assert f"({status})" in message
    right = {401: "key_variable", 402: "paid", 404: "often in /v1", 405: "often in /v1"}
    assert right.get(status, "base_url should be") in message
    assert message.isprintable()
    assert len(message) < 600
    assert len(server.asked) == 1
    assert {path for path, *_ in server.asked} == {"/v1/chat/completions"}


def test_a_failure_of_all_stops_after_some(server):
    server.plays(lambda handler, number: handler.say(b"No such parameter: max_tokens", 400))
    with pytest.raises(EndpointError, match="20 requests in a row failed") as caught:
        analyzer(server, concurrency=2).write_skills(episodes(200))
    assert "refused (400) 'No such parameter: max_tokens'" in str(caught.value)
    assert 20 <= len(server.asked) <= 21  # two at a time


def test_failures_that_are_not_in_a_row_do_not_stop(server):
    server.plays(lambda h, number: h.say(completion(GOOD)) if number % 20 == 19 else h.say(b"", 400))
    skills = analyzer(server, concurrency=1).write_skills(episodes(60))
    assert reasons(skills) == {"ok": 3, "refused (400)": 57}


def test_no_server(monkeypatch, pauses):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match="is a server running there") as caught:
        EndpointAnalyzer(url, "m", retries=2, concurrency=1).write_skills(episodes(9))
    assert url in str(caught.value)
    assert len(pauses) >= 2  # it was tried three times


def test_a_server_that_goes_away_is_a_reason(monkeypatch, client):
    """What it answered before stays; the address was right."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(endpoint.httpx2, "AsyncClient", client)
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def script(handler, number):
        if number == 2:
            server.shutdown()
            server.server_close()
        handler.say(completion(GOOD), Connection="close")

    server.plays(script)
    skills = analyzer(server, concurrency=1).write_skills(episodes(6))
    assert [skill.reason for skill in skills] == [None] * 3 + ["no connection"] * 3


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000/v1",
        "127.0.0.1/v1",
        "ftp://host/v1",
        "http://",
        "http:///v1",
        "file:///etc/passwd",
        "http://host:port/v1",
        "http://ho\nst/v1",
        f"http://user:{KEY}@host/v1",
        f"http://{KEY}@host/v1",
        f"https://host/v1?key={KEY}",
        f"https://host/v1#{KEY}",
    ],
)
def test_a_bad_address_is_told_before_anything_is_sent(url):
    with pytest.raises(EndpointError, match=r"base_url should be http\(s\)://host/path") as caught:
        EndpointAnalyzer(url, "m")
    assert KEY not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("options", [{"timeout": 0.0}, {"retries": -1}, {"concurrency": 0}, {"offline": True}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="should be|needs replay"):
        EndpointAnalyzer("http://localhost/v1", "m", **options)


# --- the key


def test_the_key_is_sent_and_shows_up_nowhere_else(server, monkeypatch, tmp_path, caplog):
    """Not in the object, the logs, the file, the skills or an error, even if the server repeats it."""
    monkeypatch.setenv("MY_KEY", f"{KEY}\n")
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "answers.jsonl"
    asking = analyzer(server, key_variable="MY_KEY", replay=path, concurrency=1)
    server.plays(
        lambda h, number: h.say(completion(json.dumps({"episode_skill": f"Use {h.headers['Authorization']}."})))
    )
    (skill,) = asking.write_skills(episodes(1))
    assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"
    assert skill.episode == "Use Bearer [key]."
    assert "Bearer [key]" in path.read_text()
    assert "POST" in caplog.text
    shown = [repr(asking), str(vars(asking)), path.read_text(), str(skill), caplog.text]
    caplog.set_level(logging.ERROR)
    for status in (302, 400, 401, 403, 404, 500):
        said = (f"Wrong key: {KEY[:9]}***" if status in (401, 403) else " " * 190 + KEY).encode()
        server.plays(lambda h, n, said=said, status=status: h.say(said, status, Location=f"http://h/?{KEY}"))
        with pytest.raises(EndpointError) as caught:
            asking.write_skills(episodes(40)[1:])
        shown.append(str(caught.value))
    assert [text for text in shown if KEY[:8] in text] == []


def test_a_key_is_sent_only_where_one_is_named(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    analyzer(server).write_skills(episodes(1))
    assert "Authorization" not in server.asked[0][1]


def test_a_stand_in_for_a_key_is_not_taken_out_of_the_words(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "first")
    assert analyzer(server, key_variable="MY_KEY").write_skills(episodes(1))[0].episode == "Look first."


@pytest.mark.parametrize("value", [None, "", "  ", f"{KEY}\n{KEY}", f"{KEY}é"])
def test_a_variable_without_a_usable_key(server, monkeypatch, value):
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(EndpointError, match="the environment variable MY_KEY should hold an ASCII key") as caught:
        analyzer(server, key_variable="MY_KEY").write_skills(episodes(1))
    assert KEY not in str(caught.value)
    assert not server.asked


def test_a_key_in_place_of_the_variables_name_is_not_repeated(server):
    with pytest.raises(EndpointError, match="NAME of an environment variable") as caught:
        analyzer(server, key_variable="hf_abcDEF0123456789")
    assert "hf_" not in str(caught.value)


# --- order and concurrency


@pytest.mark.parametrize("seed", range(4))
def test_skills_come_in_the_order_of_the_trajectories(server, seed):
    """Whatever order the answers come in, and whichever of them fail."""
    rng = random.Random(seed)
    fates = [rng.choice(["good", "good", "good", "late", "refused", "retried"]) for _ in range(30)]
    order = rng.sample(range(30), 30)
    tried = set()

    def script(handler, number):
        if fates[number] == "refused":
            return handler.say(b"", 422)
        if fates[number] == "retried" and number not in tried:
            tried.add(number)
            return handler.say(b"", 503)
        time.sleep(0.03 if fates[number] == "late" else 0)
        handler.say(completion(json.dumps({"episode_skill": f"Find thing{number}."})))

    server.plays(script)
    skills = analyzer(server, concurrency=6).write_skills([episode(n) for n in order])
    for number, skill in zip(order, skills, strict=True):
        assert skill.source == f"t{number}/0.0"
        if fates[number] == "refused":
            assert skill.reason == "refused (422)"
        else:
            assert skill.episode == f"Find thing{number}."


def test_no_more_requests_at_once_than_allowed(server):
    server.plays(lambda handler, number: (time.sleep(0.02), handler.say(completion(GOOD))))
    analyzer(server, concurrency=3).write_skills(episodes(15))
    assert server.most == 3


def test_a_request_that_waits_to_be_repeated_holds_its_place(server, monkeypatch):
    """While a busy server is given time, nobody else takes the turn."""

    async def sleep(seconds):
        await asyncio.sleep(0.03)

    monkeypatch.setattr(endpoint, "sleep", sleep)
    server.plays(first_then_good(says(b"", 429)))
    analyzer(server, concurrency=1).write_skills(episodes(3))
    assert [number for *_, number in server.asked] == [0, 0, 1, 1, 2, 2]


def test_an_interrupt_ends_the_call(server, monkeypatch):
    released = threading.Event()
    server.plays(lambda h, number: (number and released.wait(5), h.say(completion(GOOD))))

    def interrupt(bar, n=1):
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint.tqdm, "update", interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        analyzer(server, concurrency=4).write_skills(episodes(50))
    released.set()
    assert time.monotonic() - started < 3
    assert len(server.asked) < 10


# --- replay


def test_a_recorded_run_repeats_without_a_server(server, tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    server.plays(lambda h, n: h.say(b"", 422) if n == 2 else h.say(completion(GOOD if n else None)))
    skills = analyzer(server, replay=path).write_skills(episodes(4))
    assert [skill.reason for skill in skills] == ["not text", None, "refused (422)", None]
    assert all(
        row.keys() == {"request", "text", "prompt_tokens", "completion_tokens"} for row in read_jsonl(path).rows
    )
    before = path.read_bytes()
    offline = EndpointAnalyzer("http://nowhere.invalid/v1", "m", key_variable="NO_KEY", replay=path, offline=True)
    again = offline.write_skills(episodes(4))
    assert again == [*skills[:2], dataclasses.replace(skills[2], reason="not recorded"), skills[3]]
    assert path.read_bytes() == before
    assert offline.usage == endpoint.Usage(replayed=3)


def test_only_what_is_missing_is_sent(server, tmp_path):
    """After a run that broke off, its last line torn; what failed is asked again."""
    path = tmp_path / "answers.jsonl"
    analyzer(server, replay=path, concurrency=1).write_skills(episodes(4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    server.plays(first_then_good(says(b"", 422)))
    skills = analyzer(server, replay=path).write_skills(episodes(5))
    assert [skill.reason for skill in skills] == [None, None, None, "refused (422)", "refused (422)"]
    assert reasons(analyzer(server, replay=path).write_skills(episodes(5))) == {"ok": 5}
    assert server.numbers == {3: 2, 4: 2}
    assert read_jsonl(path).torn is None
    assert len(read_jsonl(path).rows) == 5


def test_answers_are_on_disk_when_a_later_request_ends_the_call(server, tmp_path):
    path = tmp_path / "answers.jsonl"
    server.plays(lambda h, number: h.say(completion(GOOD)) if number < 3 else h.say(b"", 401))
    asking = analyzer(server, replay=path, concurrency=1)
    with pytest.raises(EndpointError):
        asking.write_skills(episodes(9))
    assert len(read_jsonl(path).rows) == 3
    assert asking.usage.answered == 3
    server.plays(lambda handler, number: handler.say(completion(GOOD)))
    assert reasons(asking.write_skills(episodes(9))) == {"ok": 9}
    assert sorted(server.numbers) == list(range(3, 9))


def test_an_answer_is_that_of_the_same_request(server, tmp_path):
    path = tmp_path / "answers.jsonl"
    analyzer(server, replay=path).write_skills(episodes(1))
    for options in ({"temperature": 0.5}, {"max_tokens": 5}, {"extra": {"seed": 1}}, {"max_chars": 1}):
        analyzer(server, replay=path, **options).write_skills(episodes(1))
    EndpointAnalyzer(server.url, "other", replay=path).write_skills(episodes(1))
    assert len(server.asked) == 6
    analyzer(server, replay=path, timeout=9.0, retries=0, concurrency=2).write_skills(episodes(1))
    assert len(server.asked) == 6


def test_equal_episodes_are_asked_about_once(server):
    asking = analyzer(server, temperature=1.0)
    twins = [episode(0), dataclasses.replace(episode(0), id="t0/0.1"), episode(1)]
    assert [skill.source for skill in asking.write_skills(twins)] == ["t0/0.0", "t0/0.1", "t1/0.0"]
    assert asking.write_skills(twins)[1].ok
    assert server.numbers == {0: 1, 1: 1}
    assert (asking.usage.answered, asking.usage.replayed) == (2, 3)


def test_offline_needs_its_file(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl: should be the JSONL file"):
        EndpointAnalyzer("http://localhost/v1", "m", replay=tmp_path / "nowhere.jsonl", offline=True)
    with pytest.raises(DataError, match="should be the JSONL file"):
        EndpointAnalyzer("http://localhost/v1", "m", replay=tmp_path)


GOOD_ROW = {"request": "a", "text": "b", "prompt_tokens": 1, "completion_tokens": None}


@pytest.mark.parametrize(
    "row",
    [
        "",
        "[]",
        "{}",
        *(json.dumps({k: v for k, v in GOOD_ROW.items() if k != name}) for name in GOOD_ROW),
        *(json.dumps(GOOD_ROW | {name: ["x"]}) for name in GOOD_ROW),
        *(json.dumps(GOOD_ROW | {"prompt_tokens": value}) for value in (True, -1, 1.0, "1")),
        json.dumps(GOOD_ROW | {"more": 1}),
    ],
)
def test_malformed_replay_files(row, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{json.dumps(GOOD_ROW)}\n{row}\n")
    with pytest.raises(DataError, match=r"answers.jsonl row 2: should"):
        EndpointAnalyzer("http://localhost/v1", "m", replay=path)


def test_any_text_is_recorded_as_it_came(server, tmp_path):
    path = tmp_path / "answers.jsonl"
    text = '{"episode_skill": "줄\u2028둘\n\r셋 🙂\x00 \ud800"}'
    server.plays(lambda handler, number: handler.say(completion(text)))
    analyzer(server, replay=path).write_skills(episodes(1))
    assert [row["text"] for row in read_jsonl(path).rows] == [text]


# --- usage


def test_tokens_and_cost(server):
    """3 answers of 1000 + 50 tokens at 2 and 10 a million: 3·(1000·2 + 50·10)/10⁶ = 0.0075."""
    server.plays(lambda h, number: h.say(completion(GOOD, prompt_tokens=1000, completion_tokens=50, total_tokens=9)))
    asking = analyzer(server, prices=(2.0, 10.0))
    assert asking.usage.cost == 0
    assert analyzer(server).usage.cost is None
    asking.write_skills(episodes(2))
    asking.write_skills(episodes(3))
    used = asking.usage
    assert (used.answered, used.replayed, used.unmetered) == (3, 2, 0)
    assert (used.prompt_tokens, used.completion_tokens) == (3000, 150)
    assert used.cost == pytest.approx(0.0075, abs=1e-12)


@pytest.mark.parametrize("count", [None, -1, 1.5, True, "9", 1 << 60, [], {}])
def test_counts_that_are_none(server, count):
    server.plays(lambda h, number: h.say(completion(GOOD, prompt_tokens=count, completion_tokens=5)))
    asking = analyzer(server)
    assert reasons(asking.write_skills(episodes(1))) == {"ok": 1}
    assert asking.usage == endpoint.Usage(answered=1, unmetered=1, completion_tokens=5)


def test_usage_that_is_no_object(server):
    server.plays(lambda h, number: h.say(json.dumps({**json.loads(completion(GOOD)), "usage": "lots"}).encode()))
    asking = analyzer(server)
    asking.write_skills(episodes(2))
    assert asking.usage == endpoint.Usage(answered=2, unmetered=2)
