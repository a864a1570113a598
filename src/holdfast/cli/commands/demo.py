"""`holdfast demo`: a self-contained demonstration; needs only this package."""

from __future__ import annotations

import typer

from holdfast.cli.command import command
from holdfast.cli.session import EngineTarget
from holdfast.demo.sandbox import sandbox, until_signalled


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "demo", examples=("holdfast demo",))(demo)


async def demo(at: EngineTarget) -> None:
    """Run a few hundred jobs on a temporary SQLite file, kill a worker on the way, and check every outcome.

    Two operators take part: one approves a refund, and both are needed to discard a dead letter. Takes half a minute.
    Exit code 1 if a job did not end exactly as expected. Uses its own store: --url, --namespace, HOLDFAST_* variables
    and holdfast.toml have no effect.
    """
    with sandbox() as folder:
        # The app reads its settings when it is imported: the sandbox comes first.
        from holdfast.demo.scenario import play

        code = await until_signalled(play(folder))
    raise typer.Exit(code)
