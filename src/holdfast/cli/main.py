"""Entry point of `holdfast`.

`main` imports the commands itself, so that Ctrl-C during the import prints no traceback.
"""

from __future__ import annotations

import sys

from holdfast._platform import unsupported_error
from holdfast._version import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"holdfast {__version__}")
        return
    if (error := unsupported_error()) is not None:
        print(f"holdfast: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        from holdfast.cli.program import program

        program(sys.argv[1] if len(sys.argv) > 1 else "")(prog_name="holdfast")
    except KeyboardInterrupt:
        # The exit code of a program that SIGINT ended.
        sys.exit(130)
