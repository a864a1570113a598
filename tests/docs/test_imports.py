"""Docs and examples import only public modules, and each public package exports exactly the names pinned here."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PUBLIC: Final = {
    "holdfast.brokers": {"MockQueueAdapter", "MemoryBroker", "MemoryConfig"},
    "holdfast.engine": {"Engine"},
    "holdfast.ledger": {
        "ApprovalFilter",
        "AuditFilter",
        "DeadLetterFilter",
        "JobFilter",
        "JobRow",
        "verify_ledger",
    },
    "holdfast.observe": {"redact_value"},
    "holdfast.operations": {"render_metrics"},
    "holdfast.outbox": {"NewOutboxEvent", "run_relay"},
    "holdfast.triggers": {"CallableRuntime", "HttpRuntime", "QueueTrigger", "TaskRuntime", "QueueTriggerConfig"},
}
#: Public modules whose names other tests pin.
OTHERS: Final = {
    "holdfast",
    "holdfast.effects",
    "holdfast.errors",
    "holdfast.http",
    "holdfast.mongo",
    "holdfast.testing",
    "holdfast.testing.contract",
    "holdfast.webhooks",
}
_IMPORT: Final = re.compile(
    r"^\s*(?:from (holdfast(?:\.[\w.]+)?) import|import (holdfast(?:\.[\w.]+)?)\b)", re.MULTILINE
)


def _pages() -> list[Path]:
    files = subprocess.run(
        ["git", "ls-files", "README.md", "docs", "examples"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [ROOT / file for file in files if file.endswith((".md", ".py")) and "/decisions/" not in file]


def test_docs_and_examples_import_public_modules_only() -> None:
    found = {
        (page.relative_to(ROOT).as_posix(), module)
        for page in _pages()
        for match in _IMPORT.finditer(page.read_text())
        if (module := match[1] or match[2]) not in PUBLIC.keys() | OTHERS
    }
    assert not found


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_a_package_exports_these_names(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    assert all(getattr(module, name) is not None for name in PUBLIC[package])
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = module.missing


def test_exports_are_loaded_at_first_use() -> None:
    code = (
        "import sys\n"
        f"import {', '.join(sorted(PUBLIC))}\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('sqlalchemy', 'pydantic', 'httpx')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
