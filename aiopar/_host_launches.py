"""What calls on the CPU launch on accelerators, which is complete when they end."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._call import Call
from ._devices import (
    CallerStream,
    accelerators_in_use,
    current_stream,
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
        """Wait for what `callers` have launched on other streams than the default ones.

        Args:
            callers: Their streams.
            used: What they hand over, which the calling thread is to use.
        """
        try:
            devices = set()
            for caller in callers:
                if caller.event is not None:
                    caller.event.synchronize()
                    devices.add(caller.stream.device)
            if devices:
                handed_over = [*used]
                for device in devices:
                    share_memory(handed_over, current_stream(device))
        finally:
            del used

    def put(self, call: Call[Any]) -> bool:
        """Wait until the result of `call`, which has returned, is complete; it is to be ended."""
        try:
            if accelerators_in_use():
                for event in result_events(tensors(call.result)):
                    event.synchronize()
                for caller in call.streams:
                    if caller.event is not None:
                        share_memory(tensors(call.result), caller.stream)
            return False
        finally:
            del call

    def stop(self, then: Callable[[], None]) -> None:
        """Call `then`: nothing launched is left."""
        then()
