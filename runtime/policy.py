"""Which experts of a layer deserve a slot. The engine uses `DecayedFrequency`.

Pure bookkeeping on expert numbers; the engine and the replay of traces run this same code.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

__all__ = [
    "HALF_LIFE_TOKENS",
    "POLICIES",
    "Belady",
    "DecayedFrequency",
    "Frequency",
    "Policy",
    "Recency",
    "S3Fifo",
    "WTinyLfu",
]

# Best or within 1.2 points of LRU, SLRU, ARC, S3-FIFO and W-TinyLFU on six public routing traces;
# on three of them half-lives from 12 to 24 are within 0.1 points of each other on average.
HALF_LIFE_TOKENS = 12
RESCALE_ABOVE = 1e200  # far below the largest float64, 1.8e308
S3_MOST_USES = 3
LFU_MOST_USES = 15


class Policy(Protocol):
    """What a SlotCache tells and asks. A call is told with `use` or `use_many` before its reads."""

    @property
    def scores(self) -> Sequence[float]:
        """What each expert is worth, resident or not, none negative: waves keep the highest."""
        ...

    def use(self, experts: Iterable[int]) -> None:
        """One token picked these distinct experts."""
        ...

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """A call of `n_tokens` tokens picked expert e `counts[e]` times in all."""
        ...

    def victims(self, candidates: Sequence[int], n: int) -> list[int]:
        """The `n` to evict, which they are then, of residents in order of last use."""
        ...

    def filled(self, expert: int) -> None:
        """An expert became resident."""
        ...

    def evicted(self, expert: int) -> None:
        """A resident gave up its slot; may be told twice."""
        ...


class Scored:
    """Evicts the lowest score, then the least recently used; being resident does not matter."""

    def __init__(self, n_experts: int) -> None:
        self.scores = [0.0] * n_experts

    def victims(self, candidates: Sequence[int], n: int) -> list[int]:
        """See Policy."""
        if n == 1:
            return [min(candidates, key=self.scores.__getitem__)]
        return sorted(candidates, key=self.scores.__getitem__)[:n]

    def filled(self, expert: int) -> None:
        """See Policy."""

    def evicted(self, expert: int) -> None:
        """See Policy."""


class DecayedFrequency(Scored):
    """Scores: uses per expert, halved every `half_life` tokens, kept after eviction.

    Instead of fading every score at every token, each new use weighs more than the last.
    """

    def __init__(self, n_experts: int, half_life: float = HALF_LIFE_TOKENS) -> None:
        super().__init__(n_experts)
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

    def relative_scores(self) -> list[float]:
        """The scores in uses, a use of the last token being one."""
        return [score / self._weight for score in self.scores]

    def _advance(self, factor: float) -> float:
        if self._weight > RESCALE_ABOVE:
            self.scores = [score / self._weight for score in self.scores]
            self._weight = 1.0
        self._weight *= factor
        return self._weight


class Recency(Scored):
    """LRU. Scores: the number of the call that used the expert last."""

    def __init__(self, n_experts: int) -> None:
        super().__init__(n_experts)
        self._n_calls = 0

    def use(self, experts: Iterable[int]) -> None:
        """See Policy."""
        self._n_calls += 1
        for expert in experts:
            self.scores[expert] = self._n_calls

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """See Policy."""
        self.use(counts)


class Frequency(Scored):
    """LFU. Scores: all uses so far, never faded."""

    def use(self, experts: Iterable[int]) -> None:
        """See Policy."""
        for expert in experts:
            self.scores[expert] += 1

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """See Policy."""
        for expert, count in counts.items():
            self.scores[expert] += count


class Belady(Scored):
    """Evicts what is needed again last: over all calls no policy hits more, unless some need waves.

    `future`: the experts of every call there will be. Scores: calls from the next use to the end.
    """

    def __init__(self, n_experts: int, future: Sequence[Collection[int]]) -> None:
        super().__init__(n_experts)
        self._after: list[dict[int, int]] = []  # of each call, what its experts score after it
        following = [0] * n_experts
        for to_end, experts in enumerate(reversed(future), start=1):
            self._after.append({expert: following[expert] for expert in experts})
            for expert in experts:
                following[expert] = to_end
        self.scores = [float(score) for score in following]

    def use(self, experts: Iterable[int]) -> None:
        """See Policy. The call must be the next of `future`."""
        for expert, score in self._after.pop().items():
            self.scores[expert] = score

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """See Policy. The call must be the next of `future`."""
        self.use(counts)


class S3Fifo:
    """Three queues: newcomers (a tenth), those used again, and a ghost of newcomers sent away."""

    def __init__(self, n_experts: int, n_slots: int) -> None:
        self._n_new = max(1, n_slots // 10)
        self._n_ghosts = max(1, n_slots - self._n_new)
        self._uses = [0] * n_experts  # of residents, since they came or were last spared
        self._new: dict[int, None] = {}
        self._main: dict[int, None] = {}
        self._ghosts: dict[int, None] = {}

    @property
    def scores(self) -> Sequence[float]:
        """See Policy: uses, and one for having proved itself."""
        return [
            uses + (expert in self._main or expert in self._ghosts)
            for expert, uses in enumerate(self._uses)
        ]

    def use(self, experts: Iterable[int]) -> None:
        """See Policy."""
        for expert in experts:
            if expert in self._new or expert in self._main:
                self._uses[expert] = min(self._uses[expert] + 1, S3_MOST_USES)

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """See Policy. A call is one use, however many tokens it has."""
        self.use(counts)

    def victims(self, candidates: Sequence[int], n: int) -> list[int]:
        """See Policy."""
        free = set(candidates)
        chosen = []
        for _ in range(n):
            victim = self._victim(free)
            free.remove(victim)
            self.evicted(victim)
            chosen.append(victim)
        return chosen

    def filled(self, expert: int) -> None:
        """See Policy."""
        self._uses[expert] = 0
        if expert in self._ghosts:
            del self._ghosts[expert]
            self._main[expert] = None
        else:
            self._new[expert] = None

    def evicted(self, expert: int) -> None:
        """See Policy."""
        self._uses[expert] = 0
        self._main.pop(expert, None)
        if expert in self._new:
            del self._new[expert]
            self._ghosts[expert] = None
            if len(self._ghosts) > self._n_ghosts:
                del self._ghosts[next(iter(self._ghosts))]

    def _victim(self, free: Collection[int]) -> int:
        while True:
            new = _first(self._new, free)
            main = _first(self._main, free)
            if new is not None and (main is None or len(self._new) >= self._n_new):
                if self._uses[new] < 2:
                    return new
                del self._new[new]
                self._main[new] = None
                self._uses[new] = 0
            else:
                assert main is not None  # every resident is in one of the two
                if self._uses[main] == 0:
                    return main
                self._uses[main] -= 1
                _to_end(self._main, main)


class WTinyLfu:
    """A small window of newcomers, which stay only if used more often than what they would replace.

    The rest is an LRU of two segments: those used once there, and (four fifths) those used again.
    Uses are counted exactly, to 15, and halved after every ten per slot.
    """

    def __init__(self, n_experts: int, n_slots: int) -> None:
        self._n_window = max(1, n_slots // 100)
        self._n_settled = n_slots - self._n_window
        self._n_safe = self._n_settled * 4 // 5
        self._sample = 10 * n_slots
        self._seen = 0
        self._uses = [0] * n_experts
        self._window: dict[int, None] = {}  # all three in order of last use, oldest first
        self._trial: dict[int, None] = {}
        self._safe: dict[int, None] = {}

    @property
    def scores(self) -> Sequence[float]:
        """See Policy: uses."""
        return self._uses

    def use(self, experts: Iterable[int]) -> None:
        """See Policy."""
        for expert in experts:
            self._uses[expert] = min(self._uses[expert] + 1, LFU_MOST_USES)
            self._seen += 1
            if expert in self._trial:
                del self._trial[expert]
                self._safe[expert] = None
                if len(self._safe) > self._n_safe:
                    oldest = next(iter(self._safe))
                    del self._safe[oldest]
                    self._trial[oldest] = None
            elif expert in self._safe:
                _to_end(self._safe, expert)
            elif expert in self._window:
                _to_end(self._window, expert)
        if self._seen >= self._sample:
            self._uses = [uses // 2 for uses in self._uses]
            self._seen //= 2

    def use_many(self, counts: Mapping[int, int], n_tokens: int) -> None:
        """See Policy. A call is one use, however many tokens it has."""
        self.use(counts)

    def victims(self, candidates: Sequence[int], n: int) -> list[int]:
        """See Policy."""
        free = set(candidates)
        chosen = []
        for left in range(n, 0, -1):
            victim = self._victim(free, left)
            free.remove(victim)
            self.evicted(victim)
            chosen.append(victim)
        return chosen

    def filled(self, expert: int) -> None:
        """See Policy."""
        self._window[expert] = None
        n_settled = len(self._trial) + len(self._safe)
        if len(self._window) > self._n_window and n_settled < self._n_settled:
            oldest = next(iter(self._window))
            del self._window[oldest]
            self._trial[oldest] = None

    def evicted(self, expert: int) -> None:
        """See Policy."""
        for queue in (self._window, self._trial, self._safe):
            queue.pop(expert, None)

    def _victim(self, free: Collection[int], n_coming: int) -> int:
        """One of `free` that makes room for the first of `n_coming`."""
        while True:
            newcomer = _first(self._window, free)
            settled = _first(self._trial, free)
            if settled is None:
                settled = _first(self._safe, free)
            if settled is None:
                assert newcomer is not None  # every resident is in one of the three
                return newcomer
            if newcomer is None or len(self._window) + n_coming <= self._n_window:
                return settled
            if self._uses[newcomer] <= self._uses[settled]:
                return newcomer
            del self._window[newcomer]
            self._trial[newcomer] = None
            return settled


def _first(queue: Iterable[int], free: Collection[int]) -> int | None:
    """The first of a queue that is free."""
    return next((expert for expert in queue if expert in free), None)


def _to_end(queue: dict[int, None], expert: int) -> None:
    del queue[expert]
    queue[expert] = None


# By name, from experts, slots and the experts of every call to come.
POLICIES: dict[str, Callable[[int, int, Sequence[Collection[int]]], Policy]] = {
    "decayed": lambda n_experts, n_slots, future: DecayedFrequency(n_experts),
    "lru": lambda n_experts, n_slots, future: Recency(n_experts),
    "lfu": lambda n_experts, n_slots, future: Frequency(n_experts),
    "s3-fifo": lambda n_experts, n_slots, future: S3Fifo(n_experts, n_slots),
    "w-tinylfu": lambda n_experts, n_slots, future: WTinyLfu(n_experts, n_slots),
    "belady": lambda n_experts, n_slots, future: Belady(n_experts, future),
}
