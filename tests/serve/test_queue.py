"""`RequestQueue`: which request leads a batch, which ones join it, and that none waits forever."""

import gc
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from .queues import Item, Queue


def filled(
    items: Iterable[Item], *, size: int = 2, limits: Mapping[Any, int] | None = None
) -> Queue:
    queue = Queue(max_batch_size=size, limits=limits)
    for item in items:
        queue.push(item)
    return queue


def filled_by_cost(
    costs: Iterable[float], *, size: int, most: float | None = None, padded: bool = False
) -> Queue:
    queue = Queue(max_batch_size=size, max_batch_cost=most, by_cost=True, padded=padded)
    for cost in costs:
        queue.push(Item(cost=cost))
    return queue


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


def test_first_come_first_served() -> None:
    queue = filled(map(Item, "abcde"))
    assert names(queue) == ["ab", "cd", "e"]
    assert queue.pop_batch() == []


def test_the_lowest_priority_goes_first() -> None:
    queue = filled(Item(name, priority=ord(name)) for name in "caba")
    queue.push(Item("-", priority=-1))
    assert names(queue) == ["-a", "ab", "c"]


def test_keys_are_never_mixed() -> None:
    assert names(filled(Item(name, key=name.lower()) for name in "aBAbcA")) == [
        "aA",
        "Bb",
        "c",
        "A",
    ]


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


def test_a_low_priority_gets_through_an_endless_stream_of_high_ones() -> None:
    low = Item(priority=9)
    queue = filled([low, Item()], size=1)
    batches = 0
    while low in queue:
        batches += 1
        queue.pop_batch()
        queue.push(Item())
    assert batches == 33


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


def test_costs_near_the_leaders_go_with_it() -> None:
    queue = filled_by_cost([10, 500, 13, 480, 11, 520, 1000, 9], size=3)
    assert costs(queue) == [[10, 11, 9], [500, 480, 520], [13, 1000]]


def test_nearness_counts_within_a_priority() -> None:
    queue = filled_by_cost([10, 90], size=2)
    for cost in (12, 11):
        queue.push(Item(cost=cost, priority=1))
    assert costs(queue) == [[10, 90], [12, 11]]


def test_what_does_not_fit_is_passed_over_for_the_next_nearest_that_fits() -> None:
    queue = filled_by_cost([10, 12, 11, 11, 4, 1], size=4, most=26)
    assert costs(queue) == [[10, 11, 4, 1], [12, 11]]


def test_of_two_that_are_as_near_the_cheaper_may_fit_alone() -> None:
    assert costs(filled_by_cost([5, 7, 3, 7, 3], size=5, most=18)) == [[5, 7, 3, 3], [7]]


def test_who_costs_more_than_a_batch_may_goes_alone() -> None:
    assert costs(filled_by_cost([1, 50, 2], size=3, most=10)) == [[1, 2], [50]]


@pytest.mark.parametrize(
    ("waiting", "most", "batches"),
    [
        ([10, 12, 11, 11, 4, 1], 26, [[10, 11], [12, 11], [4, 1]]),
        ([2, 5], 8, [[2], [5]]),  # though they cost 7 in sum
        ([2, 3, 1, 4, 0], 12, [[2, 3, 1, 0], [4]]),  # 3 is the dearest, not the leader
        ([2, 3, 1, 4, 0], 11, [[2, 3, 1], [4, 0]]),
        ([3, 0, 0, 0], 9, [[3, 0, 0], [0]]),
        ([50, 0, 0], 10, [[50], [0, 0]]),
    ],
)
def test_padded_all_of_a_batch_cost_as_much_as_the_dearest(
    waiting: list[float], most: float, batches: list[list[float]]
) -> None:
    assert costs(filled_by_cost(waiting, size=5, most=most, padded=True)) == batches


def test_padded_the_next_priority_has_the_room_that_one_leaves() -> None:
    queue = filled_by_cost([4, 5], size=5, most=16, padded=True)
    for cost in (6, 5, 1):
        queue.push(Item(cost=cost, priority=1))
    assert costs(queue) == [[4, 5, 5], [6, 1]]


def test_a_far_cost_does_not_starve() -> None:
    queue = filled_by_cost([10, 10, 10], size=2)
    far = Item(cost=1000)
    queue.push(far)
    batches = 0
    while far in queue:
        batches += 1
        for _ in range(2):
            queue.push(Item(cost=10))
        queue.pop_batch()
    assert batches == 3, "it leads once it is the oldest"


def test_a_limit_makes_smaller_batches_of_one_key() -> None:
    limits = {"a": 2, "b": 5}
    queue = filled((Item(name, key=name) for name in "aaabbb"), size=3, limits=limits)
    assert queue.batches() == 3
    assert names(queue) == ["aa", "a", "bbb"]


@pytest.mark.parametrize("others", ["", "b"])
def test_a_limit_that_has_changed(others: str) -> None:
    limits = {"a": 8, "b": 8}
    queue = filled((Item(name, key=name) for name in "aaaaa" + others), size=8, limits=limits)
    assert queue.batches() == 1 + len(others)
    queue.groups["a"].limit = 1
    assert queue.full()
    assert queue.pop_batch()[0].name == "a"
    assert queue.batches() == 4 + len(others)


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


def test_full_is_what_the_limit_says() -> None:
    for keys, limits, full in [
        ("aab", {"a": 3, "b": 2}, False),
        ("aab", {"a": 2, "b": 2}, True),
        ("aab", {"a": 3, "b": 1}, True),
        ("aa", {"a": 3}, False),
        ("aa", {"a": 2}, True),
    ]:
        assert filled((Item(key=key) for key in keys), size=3, limits=limits).full() is full


@pytest.mark.parametrize(("priority", "before"), [(0, 0), (1, 2), (2, 2), (3, 4)])
def test_batches_before_count_no_higher_priorities(priority: int, before: int) -> None:
    queue = filled((Item(priority=other) for other in [1] * 5 + [3] * 3), size=2)
    assert queue.batches_before(Item(priority=priority)) == before


@pytest.mark.parametrize(("priority", "before"), [(0, 9), (1, 11)])
def test_batches_before_are_counted_per_key(priority: int, before: int) -> None:
    queue = filled(
        [*(Item(key=n) for n in range(9)), *(Item(key="bulk", priority=1) for _ in range(5))],
        size=3,
    )
    assert queue.batches_before(Item(key="own", priority=priority)) == before


@pytest.mark.parametrize(("priority", "before"), [(0, 2), (1, 2), (2, 3)])
def test_batches_before_by_cost(priority: int, before: int) -> None:
    queue = filled_by_cost([4, 5, 6], size=9, most=8)
    queue.push(Item(cost=5, priority=1))
    queue.push(Item(cost=8, priority=2))
    assert queue.batches_before(Item(cost=1, priority=priority)) == before


def test_batches_before_of_equal_requests() -> None:
    queue = filled([Item(), Item()])
    assert queue.batches_before(Item()) == 1
    assert queue.batches_before(Item(key="other")) == 1
    assert queue.batches_before(Item(priority=-1)) == 0
    assert filled([]).batches_before(Item()) == 0


def test_batches_before_changes_nothing() -> None:
    queue = filled([Item("a"), Item("b"), Item("c")])
    queue.batches_before(Item(key="other", priority=-1))
    assert queue.is_uniform
    assert names(queue) == ["ab", "c"]


def test_full_by_cost() -> None:
    assert not filled_by_cost([4, 5], size=3, most=10).full()
    assert filled_by_cost([4, 5, 1], size=9, most=10).full()
    assert filled_by_cost([1, 1, 1], size=3, most=10).full()


@pytest.mark.parametrize(
    ("waiting", "full"),
    [([6], True), ([5], False), ([3, 3], False), ([4, 6], True), ([2, 3], False)],
)
def test_full_padded(waiting: list[float], full: bool) -> None:
    assert filled_by_cost(waiting, size=9, most=11, padded=True).full() == full


def test_full_padded_where_its_shares_do_not_add_up_exactly() -> None:
    queue = filled_by_cost([42] * 7, size=9, most=300, padded=True)  # 7 * (300 / 7) is below 300
    assert queue.full()
    assert queue.batches() == 1


def test_batches_counts_each_key_by_itself() -> None:
    assert filled(Item(key=key) for key in "aaabbc").batches() == 4
    assert filled_by_cost([4, 4, 4], size=2, most=100).batches() == 2
    assert filled_by_cost([4, 4, 4], size=9, most=5).batches() == 3
    assert filled_by_cost([4, 4, 4], size=9, most=11).batches() == 2
    assert filled_by_cost([6, 6, 6], size=9, most=11, padded=True).batches() == 3
    assert filled([]).batches() == 0


def test_clear_takes_all_out_in_the_order_of_their_arrival() -> None:
    items = [Item(key=n % 2, priority=-n) for n in range(5)]
    queue = filled(items)
    assert queue.clear() == items
    assert (len(queue), queue.batches(), queue.oldest, queue.pop_batch()) == (0, 0, None, [])
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
