"""Paths whose parts may have slashes in them: names of queues, tenants and jobs are printable ASCII, slashes too."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from starlette.routing import Match, Route
from starlette.types import Scope

_SLASH: Final = re.compile(rb"%2f", re.IGNORECASE)
#: Stands for an encoded slash while the path is taken apart. No name has it.
_HELD: Final = "\ufdd0"


class Place(Route):
    """A route that tells `%2F`, which is part of a name, from `/`; servers hand both on as `/`."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw: bytes = scope.get("raw_path") or b""
        if not _SLASH.search(raw):
            return super().matches(scope)
        path = unquote_to_bytes(_SLASH.sub(_HELD.encode(), raw.partition(b"?")[0])).decode("utf-8", "replace")
        found, child = super().matches(dict(scope) | {"path": path})
        parameters: dict[str, Any] = child.get("path_params", {})
        for name, value in parameters.items():
            parameters[name] = value.replace(_HELD, "/")
        return found, child
