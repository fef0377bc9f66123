"""`Readers` and `StreamRequest`: when the next step is due, and what is read after the end."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

import aiopar
from aiopar.executor._generators import END
from aiopar.serve._streaming import Readers, StreamRequest

from ..interruptions import at_every_point
from .stand_ins import Loop, Waiting


def request(buffer: int = 1) -> StreamRequest:
    made = StreamRequest("item", Waiting(Loop()))
    made.buffer = buffer
    return made


_EVENTS = st.tuples(st.sampled_from(["step", "read", "leave"]), st.integers(0, 3))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.lists(_EVENTS, max_size=60))
def test_a_step_is_due_while_all_who_read_have_room(
    buffers: list[int], events: list[tuple[str, int]]
) -> None:
    requests = [request(buffer) for buffer in buffers]
    readers = Readers(requests)
    here = set(range(len(requests)))
    due = True

    def now_due() -> None:
        nonlocal due
        assert not due, "called once"
        due = True

    for event, index in events:
        one = requests[index % len(requests)]
        if event == "step" and due and here:
            readers.send()
            for each in requests:
                each.resolve("part")
            due = False
            readers.when_due(now_due)
        elif event == "read" and one.parts:
            assert one.read() == "part"
        elif event == "leave":
            one.abandon()
            here.discard(index % len(requests))
        assert due == all(len(requests[i].parts) < buffers[i] for i in here)
        assert readers.gone == (not here)


def test_who_has_left_before_the_first_part_is_none_of_them() -> None:
    gone, here = request(), request()
    gone.abandon()
    readers = Readers([gone, here])
    assert not readers.gone
    here.abandon()
    assert readers.gone


@pytest.mark.parametrize("full", [False, True])
def test_the_garbage_collector_may_close_a_reader_in_the_midst_of_anything(full: bool) -> None:
    lost, here = request(), request(2)

    def joining() -> Iterator[StreamRequest]:
        yield lost
        if not full:
            lost.abandon()  # as the finally of a coroutine that nobody awaits any more
        yield here

    readers = Readers(joining())

    class LosesOne(dict[StreamRequest, int]):  # where `send` goes through it, with the lock held
        def __iter__(self) -> Iterator[StreamRequest]:
            yield from tuple(self.keys())
            lost.abandon()

    readers._room = LosesOne(readers._room)
    readers.send()
    due = []
    readers.when_due(lambda: due.append(True))
    assert due == [True]
    assert [*readers._room.keys()] == [here]


@pytest.mark.parametrize("change", ["leave", "send"])
def test_ctrl_c_at_any_point_leaves_them_to_the_others(change: str) -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    for interruption in at_every_point():
        lost, here = request(9), request(9)
        readers = Readers([lost, here])
        with suppress(KeyboardInterrupt), interruption.by(ctrl_c):
            readers.leave(lost) if change == "leave" else readers.send()
        another = threading.Thread(target=readers.send)
        another.start()
        another.join(10)
        assert not another.is_alive()


def test_the_end_is_read_after_the_parts_and_no_deadline_comes_after_it() -> None:
    one = request(3)
    for part in ("a", "b", END, "c"):
        one.resolve(part)
    one.expire(in_queue=False)
    assert list(one.parts) == ["a", "b"]
    assert one.done
    assert one.outcome() is None


def test_a_deadline_takes_the_parts_along_an_error_does_not() -> None:
    late, failed = request(3), request(3)
    for one in (late, failed):
        one.resolve("a")
    late.expire(in_queue=False)
    failed.fail(ZeroDivisionError(), None)
    assert (list(late.parts), list(failed.parts)) == ([], ["a"])
    with pytest.raises(aiopar.DeadlineExceeded):
        late.outcome()
    with pytest.raises(ZeroDivisionError):
        failed.outcome()
