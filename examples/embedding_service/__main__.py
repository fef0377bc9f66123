"""Start the service on loopback: `python -m examples.embedding_service`, or `make serve`."""

import argparse
import socket

import uvicorn


def _port(given: str) -> int:
    port = int(given)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {port}")
    return port


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.embedding_service")
    parser.add_argument("--host", default="127.0.0.1", help="address; default: loopback")
    parser.add_argument("--port", type=_port, default=8000, help="0: any free port")
    parser.add_argument("--devices", nargs="+", help="one replica per entry: cuda:0 cuda:1")
    parser.add_argument(
        "--workers",
        choices=["threads", "processes", "ray"],
        help="where the replicas run; default: the environment variable WORKERS, or threads",
    )
    parser.add_argument(
        "--corpus-size", type=int, default=1000, help="largest number of paragraphs to search"
    )
    parser.add_argument("--timeout", type=float, default=30, help="seconds per text")
    args = parser.parse_args(argv)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:  # before torch and the weights are loaded, which takes seconds
        socket.create_server((args.host, args.port), family=family).close()
    except OSError as error:
        parser.error(f"cannot listen on {args.host} port {args.port} ({error}): try another --port")
    from .app import create_app

    try:
        app = create_app(
            args.devices,
            workers=args.workers,
            corpus_size=args.corpus_size,
            timeout=args.timeout,
        )
    except ValueError as error:  # the message names the argument
        parser.error(str(error))
    uvicorn.run(app, host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    main()
