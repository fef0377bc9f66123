"""How the benchmarks serve an app: with uvloop and httptools, as LitServe serves its own."""

import sys

import uvicorn
from fastapi import FastAPI


def run(app: FastAPI) -> None:
    """Serve on loopback, on the port that ends the command line."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[-1]),
        loop="uvloop",
        http="httptools",
        log_level="warning",
    )
