"""The client of the Search-R1 retrieval protocol: `POST {url}/retrieve` with queries, the passages as answer.

Request `{"queries": [query], "topk": k, "return_scores": true}`; answer `{"result": [[{"document": {"contents": …},
"score": …}, …]]}`, or without scores `{"result": [[{"contents": …}, …]]}`. The server is not trusted: a deadline
for every attempt, a limit on what is read, no redirects. Leaves out: several queries in one request.
"""

from __future__ import annotations

import json
import math
import ssl
from typing import Any

import httpx2
from anyio.from_thread import start_blocking_portal

from seedkit.endpoint import Failed, address, headers, insist, post_json, secret_of, variable_name
from seedkit.envs.search_corpus import Hit, as_passage

NOT_RESULT = "not a search result"


class RetrievalFailed(Exception):
    """A search that brought nothing, and why in a few words; it ends a turn, not a run."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Retriever:
    """A server of the protocol.

    Args:
        url: what stands before `/retrieve`, as in "http://127.0.0.1:8000".
        key_variable: name of the environment variable with the server's bearer token; None sends none.
        timeout: seconds for an attempt, from connecting to the last byte.
        retries: attempts after the first, on timeouts, broken connections, 408, 409, 425, 429 and 5xx; after twice as
            long a pause each time (from about a second). None after a search that failed, until one succeeds: a
            server that is down does not hold up every turn for so long.

    Raises:
        EndpointError: for an address or key variable that cannot be used.
    """

    def __init__(self, url: str, *, key_variable: str | None = None, timeout: float = 10.0, retries: int = 2) -> None:
        if not (timeout > 0 and retries >= 0):
            raise ValueError("timeout should be above 0, retries at least 0")
        self.url, self.timeout, self.retries = address(url, "/retrieve"), timeout, retries
        self._headers = headers(secret_of(variable_name(key_variable), self.url))
        self._tls = ssl.create_default_context()
        self._down = False

    def search(self, query: str, topk: int) -> list[Hit]:
        """The passages that the server finds, at most `topk` of them.

        Raises:
            RetrievalFailed: when there is no answer, or one that is no search result.
        """
        try:
            with start_blocking_portal() as portal:  # a thread of its own: notebooks have a running loop
                content = portal.call(self._ask, {"queries": [query], "topk": topk, "return_scores": True})
            found = _hits(content)[:topk]
        except Failed as failed:
            self._down = True
            raise RetrievalFailed(failed.reason) from None
        self._down = False
        return found

    async def _ask(self, body: dict[str, Any]) -> bytes:
        options: dict[str, Any] = {"headers": self._headers, "timeout": None, "verify": self._tls}
        async with httpx2.AsyncClient(follow_redirects=False, **options) as client:
            retries = 0 if self._down else self.retries
            return await insist(lambda: post_json(client, self.url, body), self.timeout, retries)


def _hits(content: bytes) -> list[Hit]:
    try:
        (found,) = json.loads(content)["result"]
        return [_hit(one) for one in found]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Failed(NOT_RESULT) from None


def _hit(found: dict[str, Any]) -> Hit:
    document, score = (found["document"], float(found["score"])) if "document" in found else (found, math.nan)
    if not isinstance(document["contents"], str):
        raise TypeError("contents should be text")
    return Hit(as_passage(str(document.get("id", "")), document["contents"]), score)
