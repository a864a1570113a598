"""At submission: a webhook's address is checked as far as that goes without a look-up, and jobs whose end somebody has
subscribed to are marked, so that the ledger can find them among millions that nobody asks about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core.job import Envelope
from holdfast.core.webhook import SUBSCRIBERS, check_target
from holdfast.errors import InvalidOption, NoLedger
from holdfast.settings import Settings
from holdfast.webhooks.messages import QUEUE, Subscribers

if TYPE_CHECKING:
    from holdfast.ledger.port import Ledger


class Postmark:
    """Stamps submissions."""

    def __init__(self, settings: Settings, ledger: Ledger | None) -> None:
        self._settings = settings
        self._exceptions = settings.webhook_exceptions
        self._has_ledger = ledger is not None
        self._subscribers = Subscribers(settings.webhooks)
        #: Whether jobs that name no webhook have to be looked at.
        self._subscribed = self._has_ledger and self._subscribers.any_for("job")

    def stamp(self, envelope: Envelope) -> Envelope:
        """The envelope as it is to be submitted. Raises `InvalidOption` for an address that cannot be, `NoLedger`."""
        webhook = envelope.meta.webhook
        if webhook and webhook != SUBSCRIBERS:
            self._check(webhook)
            return envelope
        wanted = self._subscribed and envelope.queue != QUEUE and self._subscribers.want_jobs_of(envelope.tenant_id)
        stamped = SUBSCRIBERS if wanted else ""
        if stamped == webhook:
            return envelope
        return msgspec.structs.replace(envelope, meta=msgspec.structs.replace(envelope.meta, webhook=stamped))

    def _check(self, webhook: str) -> None:
        if not self._has_ledger:
            raise NoLedger("telling a webhook")
        if not self._settings.tells and self._settings.in_memory:
            raise InvalidOption(
                "an app in memory ignores HOLDFAST_WEBHOOK_SECRET, so that tests send nothing; pass webhook_secret=… "
                "in code, or leave webhook out"
            )
        if not self._settings.tells:
            raise InvalidOption("webhooks are signed: set webhook_secret (HOLDFAST_WEBHOOK_SECRET) to whsec_…")
        check_target(webhook, self._exceptions)
