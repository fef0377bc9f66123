"""Futures that can be awaited, and their way to event loops."""
