"""`RequestQueue`: which request leads a batch, which ones join it, and that none waits forever."""

import gc
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from .queues import Item, Queue


def filled(items: Iterable[Item], *, size: int = 2, **options: Any) -> Queue:
    queue = Queue(max_batch_size=size, **options)
    for item in items:
        queue.push(item)
    return queue


def filled_by_cost(
    costs: Iterable[float], *, size: int, most: float | None = None, padded: bool = False
) -> Queue:
    """A queue by cost; costs below 0 stand for items that are less urgent."""
    items = [Item(cost=abs(cost), priority=int(cost < 0)) for cost in costs]
    return filled(items, size=size, max_batch_cost=most, by_cost=True, padded=padded)


def names(queue: Queue) -> list[str]:
    """The batches that the queue makes, until it is empty."""
    return ["".join(item.name for item in batch) for batch in iter(queue.pop_batch, [])]


def costs(queue: Queue) -> list[list[float]]:
    return [[item.cost for item in batch] for batch in iter(queue.pop_batch, [])]


def pass_over_all(queue: Queue, batches: int) -> None:
    """Pop batches of requests that came later and are more urgent."""
    for _ in range(batches):
        urgent = Item(key="urgent", priority=-1)
        queue.push(urgent)
        assert queue.pop_batch() == [urgent]


@pytest.mark.parametrize(
    ("items", "batches"),
    [
        ([Item(name) for name in "abcde"], ["ab", "cd", "e"]),
        ([Item(name, priority=ord(name)) for name in "caba"], ["aa", "bc"]),
        ([Item(name, key=name.lower()) for name in "aBAbcA"], ["aA", "Bb", "c", "A"]),
    ],
)
def test_priority_then_arrival_and_never_two_keys(items: list[Item], batches: list[str]) -> None:
    assert names(filled(items)) == batches


def test_no_group_is_kept_when_nobody_waits() -> None:
    queue = filled([Item(key=0), Item(key=1)])
    groups = [*queue.groups.values()]
    queue.groups.clear()
    assert names(queue) == ["", ""]
    queue.push(Item(key=2))
    groups += queue.groups.values()
    queue.groups.clear()
    queue.clear()
    assert not {id(group) for group in groups} & {id(it) for it in reachable(queue)}


def test_who_is_overdue_leads_and_the_most_urgent_with_its_key_go_with_it() -> None:
    queue = filled([Item("l", key="k", priority=3)], size=3)
    pass_over_all(queue, 32)
    for name, priority in [("z", 3), ("x", 2), ("y", 2)]:
        queue.push(Item(name, key="k", priority=priority))
    queue.push(Item("o", key="other", priority=-1))
    assert names(queue) == ["lxy", "o", "z"]


def test_of_those_overdue_the_oldest_leads() -> None:
    queue = filled([Item("a", priority=9), Item("b", priority=8)], size=1)
    pass_over_all(queue, 31)
    queue.push(Item("c", priority=7))
    pass_over_all(queue, 1)
    assert names(queue) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("waiting", "size", "most", "batches"),
    [
        # The costs nearest to the leader's; within one priority.
        ([10, 500, 13, 480, 11, 520, 9], 3, None, [[10, 11, 9], [500, 480, 520], [13]]),
        ([10, 90, -12, -11], 2, None, [[10, 90], [12, 11]]),
        # A cost that does not fit is passed over for the next nearest that does.
        ([10, 12, 11, 11, 4, 1], 4, 26, [[10, 11, 4, 1], [12, 11]]),
        ([5, 7, 3, 7, 3], 5, 18, [[5, 7, 3, 3], [7]]),
        ([1, 50, 2], 3, 10, [[1, 2], [50]]),
    ],
)
def test_near_costs_go_together(
    waiting: list[float], size: int, most: float | None, batches: list[list[float]]
) -> None:
    assert costs(filled_by_cost(waiting, size=size, most=most)) == batches


@pytest.mark.parametrize(
    ("waiting", "most", "batches"),
    [
        ([10, 12, 11, 11, 4, 1], 26, [[10, 11], [12, 11], [4, 1]]),
        ([2, 5], 8, [[2], [5]]),  # though they cost 7 in sum
        ([2, 3, 1, 4, 0], 12, [[2, 3, 1, 0], [4]]),  # 3 is the dearest, not the leader
        ([2, 3, 1, 4, 0], 11, [[2, 3, 1], [4, 0]]),
        ([3, 0, 0, 0], 9, [[3, 0, 0], [0]]),
        ([50, 0, 0], 10, [[50], [0, 0]]),
        (
            [4, 5, -6, -5, -1],
            16,
            [[4, 5, 5], [6, 1]],
        ),  # the next priority has the room that is left
    ],
)
def test_padded_all_of_a_batch_cost_as_much_as_the_dearest(
    waiting: list[float], most: float, batches: list[list[float]]
) -> None:
    assert costs(filled_by_cost(waiting, size=5, most=most, padded=True)) == batches


@pytest.mark.parametrize("others", ["", "b"])
def test_a_limit_that_has_changed(others: str) -> None:
    limits = {"a": 8, "b": 8}
    queue = filled((Item(name, key=name) for name in "aaaaa" + others), size=8, limits=limits)
    assert not queue.full()
    queue.groups["a"].limit = 1
    assert queue.full()
    assert queue.pop_batch()[0].name == "a"
    assert len(names(queue)) == 4 + len(others)


def test_who_is_given_back_goes_before_others_of_its_priority() -> None:
    queue = filled((Item(name, priority=1) for name in "abcd"), size=2)
    first, second = queue.pop_batch(), queue.pop_batch()
    queue.push(Item("x", priority=1))
    queue.push(Item("u"))
    queue.push_front(second)
    queue.push_front(first)
    assert queue.oldest is first[0]
    assert names(queue) == ["ua", "bc", "dx"]


def test_who_is_given_back_goes_before_others_that_are_as_near() -> None:
    queue = filled_by_cost([5, 7, 3, 3, 7], size=3)
    queue.push_front(queue.pop_batch())
    assert costs(queue) == [[5, 7, 3], [3, 7]]


def test_who_is_given_back_has_waited_as_long_as_the_oldest() -> None:
    queue = filled([Item("a", priority=9), Item("b", priority=9)], size=1)
    given_back = queue.pop_batch()
    pass_over_all(queue, 31)
    queue.push(Item("u", key="other"))
    queue.push_front(given_back)
    assert names(queue) == ["a", "b", "u"]


def test_who_is_discarded_is_in_no_batch() -> None:
    items = [Item(name) for name in "abcd"]
    queue = filled(items)
    assert all(item in queue for item in items)
    assert queue.discard(items[0])
    assert not queue.discard(items[0])
    assert (queue.oldest, len(queue)) == (items[1], 3)
    [popped, _] = queue.pop_batch()
    assert not queue.discard(popped)
    assert [item in queue for item in items] == [False, False, False, True]


def test_full_is_what_holds_a_full_batch() -> None:
    queue = filled(Item(key=key) for key in "bba")
    assert queue.full()
    queue.push(Item(key="c", priority=-1))
    assert queue.full(), "though another, which is urgent, is still to be filled"
    queue.pop_batch()
    queue.pop_batch()
    assert not queue.full()
    assert not filled([]).full()


def test_a_full_batch_need_not_be_the_next() -> None:
    queue = filled(Item(name, key=name, priority=n) for n, name in enumerate("abcbdc"))
    assert "".join(item.name for item in queue.pop_batch(full=True)) == "bb"
    assert "".join(item.name for item in queue.pop_batch(full=True)) == "cc"
    assert queue.pop_batch(full=True) == []
    assert names(queue) == ["a", "d"]
    assert filled([Item()]).pop_batch(full=True) == []


@pytest.mark.parametrize(
    ("keys", "limits", "full", "batches"),
    [
        ("", {}, False, 0),
        ("aaabbc", {}, True, 3),
        ("aab", {"a": 3, "b": 2}, False, 2),
        ("aab", {"a": 2, "b": 2}, True, 2),
        ("aab", {"a": 3, "b": 1}, True, 2),
        ("aaabbb", {"a": 2, "b": 5}, True, 3),
    ],
)
def test_full_and_batches(keys: str, limits: dict[str, int], full: bool, batches: int) -> None:
    queue = filled((Item(key=key) for key in keys), size=3, limits=limits)
    assert queue.full() == full
    assert len(names(queue)) == batches


@pytest.mark.parametrize(
    ("waiting", "size", "most", "padded", "full"),
    [
        ([4, 5], 3, 10, False, False),
        ([4, 5, 1], 9, 10, False, True),
        ([1, 1, 1], 3, 10, False, True),
        ([4, 4, 4], 9, 5, False, True),
        ([4, 4, 4], 9, 11, False, True),
        ([6], 9, 11, True, True),
        ([5], 9, 11, True, False),
        ([3, 3], 9, 11, True, False),
        ([4, 6], 9, 11, True, True),
        ([2, 3], 9, 11, True, False),
        ([6, 6, 6], 9, 11, True, True),
        ([42] * 7, 9, 300, True, True),  # 7 * (300 / 7) is below 300
    ],
)
def test_full_by_cost(
    waiting: list[float], size: int, most: float, padded: bool, full: bool
) -> None:
    assert filled_by_cost(waiting, size=size, most=most, padded=padded).full() == full


PRIORITIES = [Item(priority=priority) for priority in [1] * 5 + [3] * 3]
KEYS = [*(Item(key=n) for n in range(9)), *(Item(key="bulk", priority=1) for _ in range(5))]


@pytest.mark.parametrize(
    ("waiting", "size", "request_", "before"),
    [
        *((PRIORITIES, 2, Item(priority=n), before) for n, before in enumerate([0, 2, 2, 4])),
        (KEYS, 3, Item(key="own"), 9),
        (KEYS, 3, Item(key="own", priority=1), 11),
        ([Item(), Item()], 2, Item(), 1),
        ([Item(), Item()], 2, Item(key="other"), 1),
        ([Item(), Item()], 2, Item(priority=-1), 0),
        ([], 2, Item(), 0),
    ],
)
def test_batches_before(waiting: list[Item], size: int, request_: Item, before: int) -> None:
    assert filled(waiting, size=size).batches_before(request_) == before


@pytest.mark.parametrize(("priority", "before"), [(0, 2), (1, 2), (2, 3)])
def test_batches_before_by_cost(priority: int, before: int) -> None:
    queue = filled_by_cost([4, 5, 6, -5], size=9, most=8)
    queue.push(Item(cost=8, priority=2))
    assert queue.batches_before(Item(cost=1, priority=priority)) == before


def test_clear_takes_all_out_in_the_order_of_their_arrival() -> None:
    items = [Item(key=n % 2, priority=-n) for n in range(5)]
    queue = filled(items)
    assert queue.clear() == items
    assert (len(queue), queue.oldest, queue.pop_batch()) == (0, None, [])
    assert not any(item in queue for item in items)


def test_memory_stays_in_proportion_to_what_waits() -> None:
    queue = Queue(max_batch_size=8, max_batch_cost=100, by_cost=True)
    ever: weakref.WeakSet[Item] = weakref.WeakSet()
    waiting: list[Item] = []
    for n in range(100_000):
        item = Item(key=n % 1009, priority=n % 13, cost=n % 97)
        ever.add(item)
        queue.push(item)
        waiting.append(item)
        if len(waiting) > 20:
            queue.discard(waiting.pop(n * 7919 % 20))
        del item
    assert len(queue) == len(ever) == 20

    afresh = Queue(max_batch_size=8, max_batch_cost=100, by_cost=True)
    for item in waiting:
        afresh.push(item)
    queue.groups.clear()
    assert held_bytes(queue) < 2 * held_bytes(afresh)


def held_bytes(root: object) -> int:
    return sum(map(sys.getsizeof, reachable(root)))


def reachable(root: object) -> list[object]:
    """All reachable objects, without code."""
    code = (type, types.ModuleType, types.FunctionType)
    found: dict[int, Any] = {}
    new: list[Any] = [root]
    while new:
        found.update((id(thing), thing) for thing in new)
        referents = gc.get_referents(*new)
        new = [it for it in referents if id(it) not in found and not isinstance(it, code)]
    return [*found.values()]
