"""Role `People`, written once for every store."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.ledger.acts import approvals, effects, letters, log, tokens
from holdfast.ledger.acts.running import Acts
from holdfast.ledger.people import Action, ApprovalRow, People, ReplayRow, TokenRow
from holdfast.ledger.port import Outcome


class SqlPeople(Acts, People):
    """A store says how an act is run."""

    async def add_token(self, token: TokenRow, action: Action) -> None:
        await self._run(tokens.add(token, action))

    async def token(self, token_id: str) -> TokenRow | None:
        return await self._look(tokens.one(token_id))

    async def tokens(self) -> list[TokenRow]:
        return await self._look(tokens.every())

    async def revoke_token(self, token_id: str, action: Action) -> None:
        await self._run(tokens.revoke(token_id, action))

    async def vote(
        self, tenants: Sequence[str] | None, approval_id: str, *, person: str, approve: bool, reason: str
    ) -> ApprovalRow:
        return await self._run(approvals.vote(tenants, approval_id, person=person, approve=approve, reason=reason))

    async def withdraw(self, tenant_id: str, approval_id: str, reason: str) -> None:
        await self._run(approvals.withdraw(tenant_id, approval_id, reason))

    async def expire(self, limit: int) -> list[ApprovalRow]:
        # Asked every second by every process: most looks find nothing.
        if not await self._look(approvals.is_overdue()):
            return []
        return await self._run(approvals.expire(limit))

    async def undelivered_approvals(self, limit: int, after: ApprovalRow | None = None) -> list[ApprovalRow]:
        return await self._look(approvals.undelivered(limit, after))

    async def delivered(self, told: Sequence[ApprovalRow]) -> None:
        await self._run(approvals.delivered(told))

    async def undeliver(self, queue: str, since_ms: int) -> int:
        return await self._run(approvals.undeliver(queue, since_ms))

    async def request_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str, reason: str) -> None:
        await self._run(letters.request_discard(tenants, dlq_id, person=person, reason=reason))

    async def confirm_discard(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str) -> None:
        await self._run(letters.confirm_discard(tenants, dlq_id, person=person))

    async def keep(self, tenants: Sequence[str] | None, dlq_id: str, *, person: str, reason: str) -> None:
        await self._run(letters.keep(tenants, dlq_id, person=person, reason=reason))

    async def begin_replay(
        self,
        tenants: Sequence[str] | None,
        dlq_id: str,
        *,
        person: str,
        reason: str,
        payload: bytes | None,
        expected: int | None = None,
    ) -> ReplayRow:
        act = letters.begin_replay(tenants, dlq_id, person=person, reason=reason, payload=payload, expected=expected)
        return await self._run(act)

    async def abandon_replay(self, replay: ReplayRow, *, person: str, reason: str) -> None:
        await self._run(letters.abandon_replay(replay, person=person, reason=reason))

    async def unsubmitted_replays(self, limit: int, after: ReplayRow | None = None) -> list[ReplayRow]:
        return await self._look(letters.unsubmitted(limit, after))

    async def submitted(self, replays: Sequence[ReplayRow]) -> None:
        await self._run(letters.submitted(replays))

    async def resolve_effect(self, outcome: Outcome, action: Action) -> None:
        await self._run(effects.resolve(outcome, action))

    async def record(self, actions: Sequence[Action]) -> None:
        await self._run(log.record(actions))

    async def raise_alert(self, key: str, action: Action) -> bool:
        return await self._run(log.raise_alert(key, action))

    async def clear_alert(self, key: str, action: Action) -> bool:
        return await self._run(log.clear_alert(key, action))
