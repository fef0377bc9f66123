"""What a batch has come to, on its way to who waits for it."""

from typing import Any

import pytest

from aiopar.serve._outcomes import Part
from aiopar.serve._request import Request

from .stand_ins import Loop, Waiting


class Interrupted(Request):
    """A Ctrl-C comes when it is about to be told."""

    interrupted = False

    def resolve(self, result: Any) -> None:
        self._interrupt()
        super().resolve(result)

    def fail(self, error: BaseException, traceback: Any) -> None:
        self._interrupt()
        super().fail(error, traceback)

    def _interrupt(self) -> None:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("error", [None, ValueError("all of them")])
def test_who_was_about_to_be_told_is_told(error: ValueError | None) -> None:
    loop = Loop()
    requests = [kind(n, Waiting(loop)) for n, kind in enumerate([Request, Interrupted, Request])]
    part = Part(requests, "abc", unbatched=True, error=error)
    part.share_out(set())
    with pytest.raises(KeyboardInterrupt):
        part.deliver()
    part.deliver()
    assert [request.done for request in requests] == [True] * 3
    if error is None:
        assert [request.outcome() for request in requests] == ["a", "b", "c"]
    else:
        assert [str(request.error) for request in requests] == ["all of them"] * 3
