"""The order to go through the shards in, so that few are needed at once. Pure planning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Step", "peak_nbytes", "plan_steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """Have `fetch` at hand (None: no shard), write `tensors`, then `release` is needed no more."""

    fetch: str | None
    tensors: tuple[str, ...]
    release: tuple[str, ...]


def plan_steps(needs: Mapping[str, frozenset[str]], shards: Sequence[str]) -> list[Step]:
    """One step a shard, in order: every tensor is written as soon as all its shards were fetched.

    `needs` maps a tensor to the shards it is made of, in the order tensors are to be written.
    """
    last_needed = dict.fromkeys(shards, -1)
    place = {shard: i for i, shard in enumerate(shards)}
    ready: list[list[str]] = [[] for _ in shards]
    for tensor, sources in needs.items():
        index = max((place[shard] for shard in sources), default=0)
        ready[index].append(tensor)
        for shard in sources:
            last_needed[shard] = max(last_needed[shard], index)
    return [
        Step(
            shard,
            tuple(ready[i]),
            tuple(s for s in shards[: i + 1] if max(last_needed[s], place[s]) == i),
        )
        for i, shard in enumerate(shards)
    ]


def peak_nbytes(
    steps: Sequence[Step],
    tensor_nbytes: Mapping[str, int],
    fetched_nbytes: Mapping[str, int],
    freed_nbytes: Mapping[str, int],
) -> int:
    """The most disk space that the steps take above what was in use before them.

    `fetched_nbytes[shard]` is what having a shard at hand takes, `freed_nbytes[shard]` what
    releasing it gives back.
    """
    used = peak = 0
    for step in steps:
        used += fetched_nbytes.get(step.fetch, 0) if step.fetch is not None else 0
        used += sum(tensor_nbytes[name] for name in step.tensors)
        peak = max(peak, used)
        used -= sum(freed_nbytes.get(shard, 0) for shard in step.release)
    return peak
