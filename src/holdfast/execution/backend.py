"""`backend_of`: access to the internal side of an app.

For packages of holdfast that need more than its public members. `client/backend.py` implements it. Each caller states
the part it uses as a protocol, for example `WorkerBackend`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class BackendOwner(Protocol[B_co]):
    """An app, or what a worker accepts instead of one."""

    @property
    def _backend(self) -> B_co: ...


def backend_of(app: BackendOwner[B]) -> B:
    """Return the app's backend. This function is the only access to it."""
    return app._backend
