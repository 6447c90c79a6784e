"""KV caches of past prompts and answers, for prompts that begin alike.

mlx-lm's LRUPromptCache copies a cache to use it. Here a cache is moved out and put back, so that
those kept and the one in use stay within the memory that one context was planned to take.
"""

from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import common_prefix_len

__all__ = ["Prefixes", "cut_back"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A cache, the tokens it holds, and how many of them were a prompt."""

    tokens: list[int]
    n_prompt: int
    cache: list[Any]
    nbytes: int


class Prefixes:
    """The caches kept, oldest first, of `budget` bytes at most with the one in use."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: list[Entry] = []

    def take(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        """(cache, how many of `tokens` it holds): the longest, moved out; (None, 0) without one.

        At least one token is left to run. A cache of another conversation, which shares less than
        half of its prompt, stays.
        """
        best, n_best = None, 0
        for entry in self._entries:
            n = common_prefix_len(tokens[:-1], entry.tokens)
            if 2 * n < entry.n_prompt or n <= n_best:
                continue
            if n == len(entry.tokens) or can_trim_prompt_cache(entry.cache):
                best, n_best = entry, n
        if best is None:
            return None, 0
        self._entries = [entry for entry in self._entries if entry is not best]
        if n_best < len(best.tokens):
            trim_prompt_cache(best.cache, len(best.tokens) - n_best)
        return best.cache, n_best

    def put(self, tokens: list[int], n_prompt: int, cache: list[Any]) -> None:
        """Keep a cache that holds `tokens`, as far as there is room."""
        self._entries.append(Entry(tokens, n_prompt, cache, cache_nbytes(cache)))
        self.make_room(0)

    def make_room(self, in_use: int) -> None:
        """Drop the oldest until those kept and `in_use` bytes are within the budget."""
        while self._entries and in_use + self.nbytes > self._budget:
            del self._entries[0]

    @property
    def nbytes(self) -> int:
        """Bytes of those kept."""
        return sum(entry.nbytes for entry in self._entries)


def cache_nbytes(cache: list[Any]) -> int:
    """The bytes of all layers."""
    return sum(int(layer.nbytes) for layer in cache)


def cut_back(cache: list[Any], n_tokens: int) -> bool:
    """Cut every layer back to its first `n_tokens`, where the last call of the model was left
    midway, so that some layers hold more than others. False where a layer cannot be cut."""
    if not all(isinstance(layer, KVCache | QuantizedKVCache) for layer in cache):
        return False
    for layer in cache:
        layer.trim(layer.offset - n_tokens)
    return True
