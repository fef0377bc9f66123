"""A simulated accelerator, `sim`, for tests of placement, streams, events and memory without a GPU.

    simdevice.load()
    x = torch.ones(2, device="sim:1")

README.md says what is simulated, what the knobs do, and where it ends.
"""

from ._control import (
    Availability as Availability,
    available as available,
    fail_next_sync as fail_next_sync,
    hidden as hidden,
    load as load,
    paused as paused,
    pending_streams as pending_streams,
    recorded_streams as recorded_streams,
    reset as reset,
    set_copy_latency as set_copy_latency,
    set_inline as set_inline,
    set_kernel_latency as set_kernel_latency,
    set_memory_limit as set_memory_limit,
    set_poison as set_poison,
    sleep as sleep,
)
