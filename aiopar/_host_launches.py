"""What calls on the CPU launch on accelerators, which is complete when they end."""

from collections.abc import Callable
from typing import Any

from ._call import Call
from ._devices import current_stream, order_after, result_events, share_memory
from ._operands import operands
from ._tree import tensors


class HostLaunches:
    """Orders the calls of a worker that has no stream of its own, where there are accelerators.

    They launch on the current streams of the worker's thread, mostly the default ones. Unlike an
    accelerator's worker it waits for a result itself: that is rare here, and it has nothing to
    launch ahead of. It does not wait for what is not in the result: on a default stream that would
    be for everybody's.
    """

    pending = 0
    alive = False

    def begin(self, call: Call[Any]) -> None:
        """Order what `call` is to launch, on the calling thread, after what its caller had."""
        order_after(call.streams)
        for caller in call.streams:
            stream = current_stream(caller.stream.device)
            if stream != caller.stream:
                share_memory(operands(call), stream)

    def put(self, call: Call[Any]) -> bool:
        """Wait until the result of `call`, which has returned, is complete; it is to be ended."""
        for event in result_events(tensors(call.result)):
            event.synchronize()
        for caller in call.streams:
            if caller.stream != current_stream(caller.stream.device):
                share_memory(tensors(call.result), caller.stream)
        return False

    def stop(self, then: Callable[[], None]) -> None:
        """Call `then`: nothing launched is left."""
        then()
