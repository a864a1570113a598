"""Entry point of `holdfast`.

`main` imports the commands itself, so that Ctrl-C during the import prints no traceback.
"""

from __future__ import annotations

import sys

from holdfast._platform import unsupported_error
from holdfast._version import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"holdfast {__version__}")  # noqa: T201 - before any import
        return
    if (error := unsupported_error()) is not None:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201 - before any import
        sys.exit(2)
    try:
        from holdfast.cli.program import program

        program(sys.argv[1] if len(sys.argv) > 1 else "")(prog_name="holdfast")
    except SystemExit as exc:
        if not isinstance(exc.code, str):
            raise
        from holdfast.cli.output import emit_text

        emit_text(exc.code, out=sys.stderr)
        sys.exit(1)
    except Exception as exc:  # noqa: BLE001 - Python would print the message as it is, with its control characters
        from holdfast.cli.output import print_traceback

        print_traceback(exc)
        sys.exit(1)
    except KeyboardInterrupt:
        # The exit code of a program that SIGINT ended.
        sys.exit(130)
