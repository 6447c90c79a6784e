"""The plan of a convert over its shards, against a simulation that tries it out."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.packer.steps import Step, peak_nbytes, plan_steps


@dataclass(frozen=True)
class Work:
    """Shards in order, and the shards that each tensor is made of."""

    shards: list[str]
    needs: dict[str, frozenset[str]]

    def plan(self) -> list[Step]:
        """The steps for it."""
        return plan_steps(self.needs, self.shards)


@st.composite
def works(draw: st.DrawFn, max_sources: int = 4) -> Work:
    """Up to six shards, up to ten tensors, each made of at least one."""
    shards = [f"shard{i}" for i in range(draw(st.integers(1, 6)))]
    sources = st.frozensets(st.sampled_from(shards), min_size=1, max_size=max_sources)
    made_of = draw(st.lists(sources, max_size=10))
    return Work(shards, {f"tensor{i}": s for i, s in enumerate(made_of)})


sizes = st.integers(0, 100)
some = settings(max_examples=50)  # small cases are found soon


@some
@given(works())
def test_every_shard_is_fetched_once_in_order(work: Work) -> None:
    """A shard that no tensor needs too: its digest is wanted."""
    assert [step.fetch for step in work.plan()] == work.shards


@some
@given(works())
def test_every_tensor_is_written_once(work: Work) -> None:
    """Whatever it is made of."""
    written = [name for step in work.plan() for name in step.tensors]
    assert sorted(written) == sorted(work.needs)


@some
@given(works())
def test_tensors_of_a_step_keep_their_order(work: Work) -> None:
    """Files are written front to back."""
    order = list(work.needs)
    for step in work.plan():
        assert list(step.tensors) == sorted(step.tensors, key=order.index)


@some
@given(works())
def test_every_shard_is_released_once(work: Work) -> None:
    """None is forgotten on the disk."""
    released = [name for step in work.plan() for name in step.release]
    assert sorted(released) == sorted(work.shards)


@some
@given(works())
def test_tensors_find_their_shards_at_hand(work: Work) -> None:
    """All were fetched by then, and none was released."""
    at_hand: set[str] = set()
    for step in work.plan():
        at_hand |= {step.fetch} if step.fetch is not None else set()
        for name in step.tensors:
            assert work.needs[name] <= at_hand
        assert set(step.release) <= at_hand
        at_hand -= set(step.release)


@some
@given(works())
def test_no_tensor_could_be_written_earlier(work: Work) -> None:
    """The shard just fetched is one that it waited for."""
    for step in work.plan():
        for name in step.tensors:
            assert step.fetch in work.needs[name]


@some
@given(works())
def test_no_shard_could_be_released_earlier(work: Work) -> None:
    """It was just fetched, or a tensor just written is made of it."""
    for step in work.plan():
        used = frozenset().union(*(work.needs[name] for name in step.tensors))
        for name in step.release:
            assert name == step.fetch or name in used


@some
@given(works(max_sources=1))
def test_copied_tensors_need_one_shard_at_a_time(work: Work) -> None:
    """What is copied comes from one shard, which goes before the next one comes."""
    for step in work.plan():
        assert step.release == (step.fetch,)


@some
@given(works(), st.data())
def test_peak_is_what_a_simulation_sees(work: Work, data: st.DataObject) -> None:
    """Space is taken by a fetch and a write and given back by a release, one by one."""
    wrote = {name: data.draw(sizes) for name in work.needs}
    fetched = {name: data.draw(sizes) for name in data.draw(st.sets(st.sampled_from(work.shards)))}
    freed = {name: data.draw(sizes) for name in data.draw(st.sets(st.sampled_from(work.shards)))}
    steps = work.plan()
    usage = [0]
    for step in steps:
        changes = [fetched.get(str(step.fetch), 0), *(wrote[name] for name in step.tensors)]
        changes += [-freed.get(name, 0) for name in step.release]
        for change in changes:
            usage.append(usage[-1] + change)
    assert peak_nbytes(steps, wrote, fetched, freed) == max(usage)


@some
@given(works(max_sources=1), st.data())
def test_peak_of_a_consumed_copy_is_one_shard(work: Work, data: st.DataObject) -> None:
    """Above what the source took before: the bytes of the largest shard, once more."""
    wrote = {name: data.draw(sizes) for name in work.needs}
    shard = {s: sum(wrote[n] for n in wrote if s in work.needs[n]) for s in work.shards}
    assert peak_nbytes(work.plan(), wrote, {}, shard) == max(shard.values())


@some
@given(works(max_sources=1), st.data())
def test_peak_of_a_fetched_copy_is_the_pack_and_one_shard(work: Work, data: st.DataObject) -> None:
    """At most: a shard is gone before the next is fetched."""
    wrote = {name: data.draw(sizes) for name in work.needs}
    shard = {s: sum(wrote[n] for n in wrote if s in work.needs[n]) for s in work.shards}
    peak = peak_nbytes(work.plan(), wrote, shard, shard)
    assert sum(wrote.values()) <= peak <= sum(wrote.values()) + max(shard.values())


@some
@given(works(), st.data())
def test_peak_without_fetching_or_freeing_is_the_pack(work: Work, data: st.DataObject) -> None:
    """A source that stays as it is."""
    wrote = {name: data.draw(sizes) for name in work.needs}
    assert peak_nbytes(work.plan(), wrote, {}, {}) == sum(wrote.values())


def test_tensor_made_of_two_shards_waits_for_the_second_and_keeps_the_first() -> None:
    """The case in a nutshell."""
    needs = {"a": frozenset({"1"}), "ab": frozenset({"1", "2"}), "c": frozenset({"3"})}
    assert plan_steps(needs, ["1", "2", "3"]) == [
        Step("1", ("a",), ()),
        Step("2", ("ab",), ("1", "2")),
        Step("3", ("c",), ("3",)),
    ]


def test_tensor_made_of_nothing_is_written_first() -> None:
    """A constant that the model computes."""
    assert plan_steps({"zeros": frozenset()}, ["1", "2"]) == [
        Step("1", ("zeros",), ("1",)),
        Step("2", (), ("2",)),
    ]
