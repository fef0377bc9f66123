"""The command `python -m aiopar`."""

import argparse
import sys
from collections.abc import Sequence

from . import _doctor, _tune


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m aiopar")
    version = _doctor.version_of("aiopar")
    parser.add_argument("--version", action="version", version=f"aiopar {version}")
    commands = parser.add_subparsers(title="commands", metavar="command")
    for module in (_doctor, _tune):
        name = module.__name__.rpartition("._")[2]
        summary = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help(sys.stderr)
        return 2  # as for other wrong arguments
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130  # as shells do
    return status


if __name__ == "__main__":
    sys.exit(main())
