"""Two models on the same tokens: are their logits the same, position by position?

Teacher-forced: both get the given tokens, whatever they would have said. The first half goes
through in chunks, as a prompt does; the rest one token at a time, as an answer does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from moepack.formats.digests import digest_bytes

__all__ = [
    "LogitsComparison",
    "chunk_choices",
    "compare_logits",
    "first_difference",
    "logits_by_position",
    "logits_nbytes",
    "position_digests",
]

CHUNK_TOKENS = (128, 64, 32, 16, 8)  # of a prompt, a call: the fewer, the less memory
# Logits of a chunk that are held at once: of both models, and what the head makes them of.
LOGITS_COPIES = 4
LOGITS_SHARE = 4  # the share of the memory left that they may take is one in so many


@dataclass(slots=True)
class LogitsComparison:
    """The `logits` object of `verify --json`. `identical` counts positions equal in every bit."""

    positions: int = 0
    identical: int = 0
    max_abs_diff: float = 0.0
    max_kl: float = 0.0
    n_top1_equal: int = 0
    first_difference: int | None = None

    def as_map(self) -> dict[str, Any]:
        """For JSON; `top1_agreement` is a share of positions."""
        return {
            "positions": self.positions,
            "identical": self.identical,
            "max_abs_diff": self.max_abs_diff,
            "max_kl": self.max_kl,
            "top1_agreement": self.n_top1_equal / self.positions if self.positions else 1.0,
            "first_difference": self.first_difference,
        }

    def add(self, packed: mx.array, original: mx.array) -> None:
        """Take in logits `(positions, vocabulary)` of both for the next positions."""
        for a, b in zip(packed, original, strict=True):
            row_a, row_b = _row(a), _row(b)
            if row_a.tobytes() == row_b.tobytes():
                self.identical += 1
            else:
                if self.first_difference is None:
                    self.first_difference = self.positions
                self.max_abs_diff = max(self.max_abs_diff, _largest_difference(row_a, row_b))
                self.max_kl = max(self.max_kl, _kl_divergence(row_b, row_a))
            self.n_top1_equal += int(row_a.argmax() == row_b.argmax())
            self.positions += 1


def logits_nbytes(chunk: int, vocabulary: int) -> int:
    """Bytes that the logits of `chunk` positions take while they are compared."""
    return LOGITS_COPIES * chunk * vocabulary * mx.float32.size


def chunk_choices(room: int, vocabulary: int, most: int) -> list[int]:
    """Positions a call, most first, no more than `most`: logits leave the most of `room` bytes."""
    fitting = [c for c in CHUNK_TOKENS if logits_nbytes(c, vocabulary) <= room // LOGITS_SHARE]
    return sorted({min(chunk, most) for chunk in fitting or CHUNK_TOKENS[-1:]}, reverse=True)


def compare_logits(
    packed: nn.Module, original: nn.Module, tokens: list[int], chunk: int = CHUNK_TOKENS[0]
) -> LogitsComparison:
    """Run both models over `tokens` and compare what they say at every position."""
    result = LogitsComparison()
    pairs = zip(
        logits_by_position(packed, tokens, chunk),
        logits_by_position(original, tokens, chunk),
        strict=True,
    )
    for a, b in pairs:
        result.add(a, b)
    return result


def position_digests(
    model: nn.Module, tokens: list[int], chunk: int = CHUNK_TOKENS[0]
) -> list[bytes]:
    """For each position, the digest of its logits' bits: a run to compare with another later."""
    return [
        digest_bytes(_row(row).tobytes())
        for logits in logits_by_position(model, tokens, chunk)
        for row in logits
    ]


def first_difference(a: list[bytes], b: list[bytes]) -> int | None:
    """The first position at which two runs over the same tokens differ; None when none does."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)


def logits_by_position(
    model: nn.Module, tokens: list[int], chunk: int = CHUNK_TOKENS[0]
) -> Iterator[mx.array]:
    """Logits `(positions, vocabulary)` for the next positions, evaluated, until all are done."""
    cache = make_prompt_cache(model)
    half = len(tokens) // 2
    bounds = [*range(0, half, chunk), *range(half, len(tokens) + 1)]
    for start, end in pairwise(bounds):
        logits = model(mx.array([tokens[start:end]]), cache=cache)[0]
        mx.eval(logits, [entry.state for entry in cache])
        yield logits


def _row(logits: mx.array) -> "np.ndarray[Any, Any]":
    """One position's logits as float32, which holds those of any type."""
    return np.array(logits.astype(mx.float32))


def _largest_difference(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]") -> float:
    difference = np.abs(a.astype(np.float64) - b)
    largest = float(np.nanmax(difference, initial=0.0))
    # Equal infinities differ by nan; a nan, or an infinity, on one side alone is infinitely wrong.
    one_sided = np.isnan(a) != np.isnan(b)
    return float("inf") if one_sided.any() else largest


def _kl_divergence(p_logits: "np.ndarray[Any, Any]", q_logits: "np.ndarray[Any, Any]") -> float:
    p, q = _log_softmax(p_logits), _log_softmax(q_logits)
    return float(np.sum(np.exp(p) * (p - q)))


def _log_softmax(logits: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    shifted = logits.astype(np.float64) - logits.max()
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum())
    return result
