"""Applications whose client is listened to at once."""

import functools

import anyio.lowlevel

from aiopar.asgi import DisconnectMiddleware

# Listen from the first turn of the loop on, so that no test waits for a clock.
watched = functools.partial(DisconnectMiddleware, delay=0.0)


async def turns_of_the_loop() -> None:
    """As many as it takes to begin to listen, and a few more."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
