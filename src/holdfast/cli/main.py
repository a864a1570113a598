"""`holdfast`: the program's entry. What it needs is loaded here, where a Ctrl-C while that goes on is no error."""

from __future__ import annotations

import sys

from holdfast._platform import unsupported
from holdfast._version import __version__


def main() -> None:
    """The entry point."""
    if sys.argv[1:] == ["--version"]:
        print(f"holdfast {__version__}")
        return
    if (error := unsupported()) is not None:
        print(f"holdfast: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        from holdfast.cli.program import program

        program(sys.argv[1] if len(sys.argv) > 1 else "")(prog_name="holdfast")
    except KeyboardInterrupt:
        # As a shell reports a program that SIGINT has ended.
        sys.exit(130)
