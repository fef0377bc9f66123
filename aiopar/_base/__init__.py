"""What every other package of aiopar builds on; it knows nothing of calls."""
