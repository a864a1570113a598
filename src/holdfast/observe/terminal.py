"""The console for everything that rich draws: strings are text, never markup, and control characters are written out.

Only rich's own styles and moves of the cursor reach the terminal. Our own markup is `Text` with styles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TextIO

from rich.console import Console, ConsoleOptions, RenderableType  # noqa: TID251 - the only place
from rich.progress import Progress, ProgressColumn, TextColumn  # noqa: TID251 - the only place
from rich.segment import Segment
from rich.text import Text

from holdfast.observe.visible import visible

_PLAIN: Final = {"markup": False, "emoji": False, "highlight": False}


class SafeConsole(Console):
    """A console on a stream, by default stdout."""

    def __init__(self, file: TextIO | None = None, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(file=file, stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before rich builds a `Text`, which drops some control characters silently.
        return super().render_str(visible(text), **options | _PLAIN)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; everything that is printed passes through here."""
        for segment in super().render(renderable, options):
            # Control segments are moves of the cursor by live displays.
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def progress_bars(console: Console, label: str, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Build progress bars whose label, a format of `task`, is text."""
    return Progress(TextColumn(label, markup=False), *columns, console=console, transient=transient)
