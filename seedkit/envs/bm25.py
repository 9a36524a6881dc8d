"""BM25 over documents given as words, by `bm25s` (Lucene's formula); an index is kept in the cache and made once.

Equal scores keep the documents' order; scores are rounded, so that machines that add in another order agree.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from seedkit.envs.base import EnvError, cache_dir
from seedkit.types import digest


class Bm25:
    """An index.

    Args:
        documents: makes the documents' words; asked for only when the index is not in the cache.
        place: folder in the cache.
        key: what the documents depend on, as JSON: another key is another index.
        k1, b: BM25's constants.

    Raises:
        EnvError: where bm25s is missing.
    """

    def __init__(
        self, documents: Callable[[], Sequence[Sequence[str]]], place: str, key: Any, *, k1: float, b: float
    ) -> None:
        try:
            import bm25s
        except ImportError:
            raise EnvError("searching needs bm25s: pip install -e .[search]") from None
        path = cache_dir() / place / digest([bm25s.__version__, k1, b, key], 20)
        try:
            self._index = bm25s.BM25.load(path, show_progress=False)
            return
        except Exception:  # not there, or not whole, which raises what it likes: made again
            self._index = bm25s.BM25(method="lucene", k1=k1, b=b)
        self._index.index(list(map(list, documents())), show_progress=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            self._index.save(partial, show_progress=False)
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
        except OSError:
            if not path.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def best(self, words: Sequence[str], count: int) -> list[tuple[int, float]]:
        """(number, score) of at most `count` documents that share a word with the query, the best first."""
        ids = [self._index.vocab_dict[word] for word in words if word in self._index.vocab_dict]
        if not ids:
            return []
        scores = np.round(self._index.get_scores_from_ids(ids).astype(np.float64), 4)
        count = min(count, len(scores))
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        found = np.flatnonzero(scores >= max(least, 1e-4))
        return [(int(n), float(scores[n])) for n in found[np.lexsort((found, -scores[found]))][:count]]
