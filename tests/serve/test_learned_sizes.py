"""`LearnedSizes`: how large a batch is tried, for each key, after it ran out of memory."""

from collections.abc import Hashable
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from aiopar.serve._scheduler import LearnedSizes


def run(sizes: LearnedSizes, fits: int, batches: int, key: Hashable = None) -> list[int]:
    """The sizes of full batches that are run one after the other, with the parts of those that
    have failed."""
    ran: list[int] = []
    for _ in range(batches):
        waiting = [sizes.limit(key)]
        while waiting:
            count = waiting.pop()
            ran.append(count)
            if count <= fits:
                sizes.succeeded(key, count)
                continue
            sizes.out_of_memory(key, count)
            if count > 1:
                waiting += [count // 2, (count + 1) // 2]
    return ran


def failures(ran: list[int], fits: int) -> list[int]:
    """After how many runs each failure came, since the one before."""
    places = [place for place, count in enumerate(ran) if count > fits]
    return [after - before for before, after in pairwise(places)]


def test_a_key_that_never_failed_has_no_limit_of_its_own() -> None:
    sizes = LearnedSizes(32)
    sizes.succeeded("a", 32)
    assert sizes.limit("a") == 32
    assert not sizes._sizes


def test_it_is_halved_until_it_fits_for_that_key_alone() -> None:
    sizes = LearnedSizes(32)
    assert run(sizes, 9, 3, "a") == [32, 16, 8, 8, 16, 8, 8, 8, 8]
    assert sizes.limit("a") == 8
    assert sizes.limit("b") == 32


def test_an_odd_batch_is_halved_downwards() -> None:
    sizes = LearnedSizes(7)
    sizes.out_of_memory(None, 7)
    assert sizes.limit(None) == 3


def test_it_grows_by_an_eighth_after_32_that_fitted() -> None:
    sizes = LearnedSizes(32)
    sizes.out_of_memory(None, 32)
    limits = []
    for _ in range(8):
        limits.append(sizes.limit(None))
        for _ in range(31):
            sizes.succeeded(None, limits[-1])
        assert sizes.limit(None) == limits[-1]
        assert sizes._sizes
        sizes.succeeded(None, limits[-1])
    assert limits == [16, 18, 20, 22, 24, 27, 30, 32]
    assert not sizes._sizes, "it is forgotten"


def test_smaller_batches_say_nothing_of_larger_ones() -> None:
    sizes = LearnedSizes(32)
    sizes.out_of_memory(None, 32)
    for _ in range(1000):
        sizes.succeeded(None, 15)
    assert sizes.limit(None) == 16


def test_it_falls_back_to_what_fitted_and_tries_half_as_often() -> None:
    sizes = LearnedSizes(32)
    ran = run(sizes, 17, 3000)
    first = ran.index(18)
    assert {count for count in ran[3:] if count not in (9, 16, 18)} == set()
    gaps = failures(ran[first:], 17)
    # After the two halves of the one before, and as many that fit.
    assert gaps == [1 + 2 + 64, 1 + 2 + 128, 1 + 2 + 256, 1 + 2 + 512, 1 + 2 + 1024]


def test_a_smaller_one_that_fails_halves_it_again() -> None:
    sizes = LearnedSizes(32)
    run(sizes, 16, 20)
    assert sizes.limit(None) == 16
    sizes.out_of_memory(None, 10)
    assert sizes.limit(None) == 5


def test_what_is_above_the_limit_by_now_teaches_nothing() -> None:
    """Another batch of that size ran at the same time."""
    sizes = LearnedSizes(32)
    for _ in range(5):
        sizes.out_of_memory(None, 32)
    assert sizes.limit(None) == 16


def test_a_limit_is_never_below_one() -> None:
    sizes = LearnedSizes(1)
    sizes.out_of_memory(None, 1)
    assert sizes.limit(None) == 1


def test_no_more_than_1024_keys_are_remembered() -> None:
    sizes = LearnedSizes(32)
    for key in range(1024):
        sizes.out_of_memory(key, 32)
    sizes.out_of_memory(0, 16)
    for key in range(1024, 2000):
        sizes.out_of_memory(key, 32)
    assert sizes.limit(0) == 8, "of those that failed long ago the first goes"
    assert sizes.limit(1) == 32
    assert sizes.limit(1999) == 16
    assert len(sizes._sizes) == 1024


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 64), st.integers(0, 3)), max_size=200),
    st.integers(1, 64),
)
def test_a_limit_is_always_a_size_that_a_batch_may_have(
    events: list[tuple[bool, int, int]], most: int
) -> None:
    sizes = LearnedSizes(most)
    for fitted, count, key in events:
        if fitted:
            for _ in range(40):
                sizes.succeeded(key, min(count, sizes.limit(key)))
        else:
            sizes.out_of_memory(key, min(count, most))
        assert 1 <= sizes.limit(key) <= most


@pytest.mark.parametrize("most", [1, 2, 3, 8, 19, 32, 64])
def test_in_the_end_batches_fit_and_are_not_much_smaller_than_they_could_be(most: int) -> None:
    for fits in range(1, most + 1):
        sizes = LearnedSizes(most)
        run(sizes, fits, 2000)
        ran = run(sizes, fits, 400)
        assert sum(count > fits for count in ran) <= 0.02 * len(ran)
        assert sorted(ran)[len(ran) // 2] >= fits * 0.7
