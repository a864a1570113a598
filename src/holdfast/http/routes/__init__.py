"""The API's operations, a module for each part. Importing this registers all of them."""

from __future__ import annotations

from holdfast.http.routes import approvals, dlq, jobs, pages, queues, stream, suspended, system, triggers

__all__ = ["approvals", "dlq", "jobs", "pages", "queues", "stream", "suspended", "system", "triggers"]
