"""Serve an app by uvicorn with uvloop and httptools, as LitServe does."""

import sys

import uvicorn
from fastapi import FastAPI


def run(app: FastAPI) -> None:
    """Serve on loopback. The port is the last argument of the command line."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[-1]),
        loop="uvloop",
        http="httptools",
        log_level="warning",
    )
