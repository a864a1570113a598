"""Every trigger file in the how-to is valid and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.config_file import load_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "triggers.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILES = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
VARIABLES = {
    "KAFKA_BROKERS": "127.0.0.1:9092",
    "KAFKA_PASSWORD": "x",
    "RABBIT_PASSWORD": "x",
    "REDIS_PASSWORD": "x",
    "AGENT_TOKEN": "x",
}


@pytest.mark.parametrize("text", FILES)
def test_the_files_of_the_page_are_valid(text: str) -> None:
    assert load_text(text, environment=VARIABLES)


def test_the_page_shows_every_broker() -> None:
    shown = {entry.adapter.type for text in FILES for entry in load_text(text, environment=VARIABLES)}
    assert shown == {"kafka", "rabbitmq", "sqs", "redis", "memory"}


def test_the_page_explains_every_key_and_its_default() -> None:
    table = TEXT.partition("## The file")[2].partition("\n## ")[0]
    explained = dict(re.findall(r"^\| `([\w.]+)` \|([^|]*)\|", table, re.MULTILINE))
    fields = TriggerEntry.model_fields
    expected = {*fields, "metrics.enabled", "metrics.export_interval", "adapter.type", "adapter.connection"}
    assert set(explained) == expected - {"metrics", "adapter"}
    for name, default in explained.items():
        field = fields.get(name)
        if (
            field is None
            or field.is_required()
            or name in ("name", "prefetch", "dlq_name", "focus", "runtime", "tenants")
        ):
            continue
        assert default.strip(" `") in (str(field.default), str(field.default).lower()), name
