"""The shop's search engine: BM25 by `bm25s`, in place of WebShop's Lucene index.

Same formula and constants as pyserini's default (Lucene's BM25, k1 0.9, b 0.4). Leaves out Lucene's Porter stemmer: a
plural s is all that is taken off. Equal scores keep the documents' order. An index is kept in the cache folder under
a hash of its documents.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from seedkit.envs.base import EnvError, cache_dir
from seedkit.types import digest

K1, B = 0.9, 0.4
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
        try:
            import bm25s
        except ImportError:
            raise EnvError("the search page needs bm25s: pip install -e .[search]") from None
        corpus = [terms(text) for text in documents]
        folder = cache_dir() / "webshop" / digest([bm25s.__version__, K1, B, corpus], 20)
        try:
            self._bm25 = bm25s.BM25.load(folder, show_progress=False)
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: made again
            self._bm25 = bm25s.BM25(method="lucene", k1=K1, b=B)
            self._bm25.index(corpus, show_progress=False)
            self._save(folder)

    def _save(self, folder: Path) -> None:
        """All or nothing, also where another process does the same."""
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        self._bm25.save(partial, show_progress=False)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(partial, folder)
        except OSError:  # another process was first
            shutil.rmtree(partial)

    def top(self, query: str, count: int) -> Sequence[int]:
        """The places of the best documents, best first; only such that share a term with the query."""
        known = [t for t in terms(query) if t in self._bm25.vocab_dict]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:count]
        return [int(n) for n in best if scores[n] > 0]
