"""`aiopar._base.forking`: what there is, while others come and go."""

from collections.abc import Iterator
from weakref import WeakSet

from aiopar._base.forking import Registry


class Thing:
    """Can be weakly referenced."""


def test_what_nothing_else_keeps_is_gone() -> None:
    registry: Registry[Thing] = Registry()
    kept = Thing()
    registry.add(kept)
    registry.add(Thing())
    assert [*registry] == [kept]
    registry.clear()
    assert [*registry] == []


def test_one_that_is_added_while_another_thread_looks() -> None:
    class Joined(WeakSet[Thing]):
        def __iter__(self) -> Iterator[Thing]:
            for thing in super().__iter__():
                yield thing
                if late:
                    self.add(late.pop())

    late: list[Thing] = [Thing()]
    registry: Registry[Thing] = Registry()
    members = registry._members = Joined()
    first, second = Thing(), late[0]
    members.add(first)
    assert first in {*registry}  # since CPython 3.14 it looks at what there was when it began
    assert {*registry} == {first, second}
