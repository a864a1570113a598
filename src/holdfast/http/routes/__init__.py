"""The API's operations, one module per resource. Importing this package registers them."""

from __future__ import annotations

from holdfast.http.routes import approvals, dlq, jobs, pages, queues, stream, suspended, system, tasks, triggers

__all__ = ["approvals", "dlq", "jobs", "pages", "queues", "stream", "suspended", "system", "tasks", "triggers"]
