"""Start the service on loopback: `python -m examples.chat_service`, or `make chat`."""

import argparse

import uvicorn


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.chat_service")
    parser.add_argument("--host", default="127.0.0.1", help="address; default: loopback")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--devices", nargs="+", help="one replica per entry: cuda:0 cuda:1")
    parser.add_argument(
        "--max-batch-size", type=int, default=16, help="answers at the same time, per replica"
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds per answer")
    args = parser.parse_args(argv)
    from .app import create_app  # imports torch and transformers: seconds

    try:
        app = create_app(args.devices, max_batch_size=args.max_batch_size, timeout=args.timeout)
    except ValueError as error:  # the message names the argument
        parser.error(str(error))
    uvicorn.run(app, host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    main()
