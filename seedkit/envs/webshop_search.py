"""The shop's search engine: BM25 in place of WebShop's Lucene index.

Same formula and constants as pyserini's default (Lucene's BM25, k1 0.9, b 0.4). Leaves out Lucene's Porter stemmer: a
plural s is all that is taken off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from seedkit.envs.bm25 import Bm25

_ARTICLES_AND_SUCH = (
    "a an and are as at be but by for from i if in into is it no not of on or so that the this to with"
)
_COMMON = frozenset(_ARTICLES_AND_SUCH.split())


def terms(text: str) -> list[str]:
    """The words that are searched: lower case, without common ones and plural s."""
    words = re.findall(r"[^\W_]+", text.lower())
    return [w[:-1] if len(w) > 3 and w[-1] == "s" != w[-2] else w for w in words if w not in _COMMON]


class Index:
    """BM25 over documents. Raises `EnvError` where bm25s is missing."""

    def __init__(self, documents: Iterable[str]) -> None:
        corpus = [terms(text) for text in documents]
        self._bm25 = Bm25(lambda: corpus, "webshop", corpus, k1=0.9, b=0.4)

    def top(self, query: str, count: int) -> list[int]:
        """The places of the best documents, best first; only such that share a term with the query."""
        return [n for n, _ in self._bm25.best(terms(query), count)]
