"""All targets, and functions that are named as parsers but need none."""

from __future__ import annotations

from typing import Final

from tests.fuzz.outside import OUTSIDE
from tests.fuzz.records import RECORDS
from tests.fuzz.targets import ENGINE

TARGETS: Final = [*ENGINE, *OUTSIDE, *RECORDS]

#: Function → why it is not a target.
NOT_PARSERS: Final[dict[str, str]] = {
    "core.webhook_url.AllowList.parse": "a setting",
    "engine.redis.claims.Claims.parse_claims": "calls `parse_entry` and adoption",
    "engine.redis.net.connection.parse_url": "a setting",
    "ledger.postgres.outbox._decode_cursors": "JSON that the statement builds",
    "ledger.postgres.store.PostgresAddress.parse": "a setting",
    "neighbours.watch._parse_named": "calls `parse_facts`",
    "triggers.config_file._parse": "a file of the operator",
    "triggers.message_handler.MessageHandler._parse": "calls `MessageEnvelope.from_raw`",
}
