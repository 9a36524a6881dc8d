"""Our index behind the Search-R1 retrieval protocol, so that other trainers can search it: `seedkit serve-search`.

`POST /retrieve` with `{"queries": ["…", …], "topk": 3, "return_scores": true}`, as in `search_client`; on the
loopback interface only, and only with the bearer token that is printed at the start. Leaves out: HTTPS, and corpora
that do not fit into memory.
"""

from __future__ import annotations

import hmac
import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from seedkit.envs.base import EnvError
from seedkit.envs.search_corpus import Index, corpus_file, embedded

MOST_BYTES = 1 << 20  # of a request
MOST_QUERIES, MOST_TOPK, MOST_LETTERS = 4096, 100, 2000  # of a query


class _Refused(Exception):
    """A status and what would be right."""

    def __init__(self, status: int, right: str) -> None:
        self.status, self.right = status, right


class Server(ThreadingHTTPServer):
    """A running server: `url` is where it answers, `token` what it asks for; a thread a connection."""

    daemon_threads = True

    def __init__(self, index: Index, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.index, self.token = index, secrets.token_urlsafe(24)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of our business."""


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 10.0  # seconds that a client may take for a line or for the body's next bytes
    server_version, sys_version = "seedkit", ""

    def do_POST(self) -> None:
        """Answer a search, or say in JSON what would be right."""
        try:
            status, answer = 200, {"result": self._retrieve()}
        except _Refused as refused:
            status, answer = refused.status, {"detail": refused.right}
        content = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _retrieve(self) -> list[Any]:
        body = self._body()  # first, since closing on unread bytes would cut the answer off
        said = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(said, f"Bearer {self.server.token}".encode()):
            raise _Refused(401, "send the token that was printed at the start: Authorization: Bearer …")
        if self.path != "/retrieve":
            raise _Refused(404, "the one address here is /retrieve")
        queries, topk, with_scores = _request(body)
        found = [self.server.index.search(query, topk) for query in queries]
        documents = [[{"id": h.passage.id, "contents": h.passage.contents} for h in hits] for hits in found]
        if not with_scores:
            return documents
        return [
            [{"document": document, "score": hit.score} for document, hit in zip(row, hits, strict=True)]
            for row, hits in zip(documents, found, strict=True)
        ]

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise _Refused(411, "Content-Length should say how many bytes the body has")
        if len(length) > 9 or int(length) > MOST_BYTES:
            raise _Refused(413, f"the body should have at most {MOST_BYTES} bytes")
        return self.rfile.read(int(length))

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: what is searched for is nobody else's business."""


def _request(content: bytes) -> tuple[list[str], int, bool]:
    """(queries, topk, return_scores) of a request; topk is 3 and return_scores false where it does not say."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _Refused(400, "the body should be a JSON object")
    queries, topk, with_scores = body.get("queries"), body.get("topk", 3), body.get("return_scores", False)
    topk = 3 if topk is None else topk
    texts = queries if isinstance(queries, list) else []
    if (
        not texts
        or len(texts) > MOST_QUERIES
        or not all(isinstance(q, str) and len(q) <= MOST_LETTERS for q in texts)
    ):
        raise _Refused(400, f"'queries' should be 1 to {MOST_QUERIES} texts of at most {MOST_LETTERS} characters")
    if type(topk) is not int or not 1 <= topk <= MOST_TOPK:
        raise _Refused(400, f"'topk' should be a number from 1 to {MOST_TOPK}")
    if not isinstance(with_scores, bool):
        raise _Refused(400, "'return_scores' should be true or false")
    return texts, topk, with_scores


def serve(port: int = 8000, corpus: Path | None = None) -> None:
    """Print address and token, and answer until interrupted.

    Raises:
        EnvError: for a port or corpus that cannot be used.
    """
    index = Index(corpus_file(corpus)) if corpus is not None else embedded()
    try:
        server = Server(index, port)
    except (OSError, OverflowError) as error:
        raise EnvError(f"port {port} on 127.0.0.1 cannot be used ({error}); choose another with --port") from error
    with server:
        print(f"{len(index.passages)} passages ({index.version}) at {server.url}/retrieve", flush=True)
        print(f"token: {server.token}", flush=True)
        server.serve_forever()
