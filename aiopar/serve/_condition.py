"""How a batcher or a pool is, in words."""


def condition(closing: bool, opened: bool, ready: bool) -> str:
    """What its `repr` says."""
    if closing:
        return "closed"
    if not opened:
        return "not open"
    return "ready" if ready else "out of service"
