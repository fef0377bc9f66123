"""What calls on the CPU launch on accelerators, which is complete when they end."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._call import Call
from ._devices import (
    CallerStream,
    accelerators_in_use,
    current_stream,
    default_stream,
    on_stream,
    record_event,
    result_events,
    share_memory,
)
from ._operands import operands
from ._tree import tensors


class HostLaunches:
    """Orders the calls of a worker that has no stream of its own, where there are accelerators.

    They launch on the default streams, after what others have launched there: only a caller on
    another one is waited for, here, for what waits on a default stream is in everybody's way.
    Unlike an accelerator's worker it waits for a result itself too: that is rare here, and it has
    nothing to launch ahead of. It does not wait for what is not in the result.
    """

    pending = 0
    alive = False

    def begin(self, call: Call[Any]) -> None:
        """Order what `call` is to launch, on the calling thread, after what its caller had."""
        try:
            self.order(call.streams, operands(call))
        finally:
            del call  # an error's traceback holds this frame; likewise below

    def order(self, callers: Iterable[CallerStream], used: Iterable[torch.Tensor]) -> None:
        """Have what comes next come after what `callers` have launched.

        Args:
            callers: Their streams.
            used: What they hand over, which the calling thread is to use.
        """
        try:
            others = set()
            for caller in callers:
                if caller.event is not None:
                    caller.event.synchronize()
                    others.add(caller.stream.device)
            for device in _off_default():
                current_stream(device).wait_event(record_event(default_stream(device)))
                others.add(device)
            if others:
                handed_over = [*used]
                for device in others:
                    share_memory(handed_over, current_stream(device))
        finally:
            del used

    def put(self, call: Call[Any]) -> bool:
        """Wait until the result of `call`, which has returned, is complete; it is to be ended.

        If it asked for no synchronization nobody waits: what its caller launches comes after it.
        """
        try:
            if not accelerators_in_use():
                return False
            events = result_events(tensors(call.result))
            others = [caller.stream for caller in call.streams if caller.event is not None]
            for event in events:
                if call.synchronize or _off_default():
                    event.synchronize()
                for stream in others:
                    stream.wait_event(event)
            if events:
                for stream in others:
                    share_memory(tensors(call.result), stream)
            return False
        finally:
            del call

    def stop(self, then: Callable[[], None]) -> None:
        """Call `then`: nothing launched is left."""
        then()


def _off_default() -> list[torch.device]:
    """Where the calling thread is on another stream than the default one.

    It is inside of a block of the call in which it waits, and helps, or a call has left it so.
    """
    return [device for device in accelerators_in_use() if not on_stream(default_stream(device))]
