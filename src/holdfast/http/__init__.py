"""The HTTP service: operations, wire models, auth, event streams. Needs the extra `holdfast[http]`."""

from __future__ import annotations

try:
    import fastapi as _fastapi  # noqa: F401
except ImportError as exc:
    raise ImportError("the HTTP service needs further packages: pip install 'holdfast[http]'") from exc

from holdfast.http.app import create_api, mount

__all__ = ["create_api", "mount"]
