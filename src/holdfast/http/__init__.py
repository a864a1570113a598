"""The HTTP service: operations, wire models, auth, event streams. Needs the extra `holdfast[http]`."""

from __future__ import annotations

from holdfast.extras import missing as _missing

if (_error := _missing("the HTTP service", "fastapi", "uvicorn")) is not None:
    raise _error

from holdfast.http.app import create_api, mount

__all__ = ["create_api", "mount"]
