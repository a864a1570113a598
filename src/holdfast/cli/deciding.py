"""`holdfast dlq replay`, `discard`, `confirm`, `keep`: what people do with dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.asking import All, DryRun, Rate, Yes, confirm, counted_first, print_report, rate_per_s, which
from holdfast.cli.command import AsJson, Connection, command
from holdfast.cli.dlq import dlq as dlq
from holdfast.cli.filters import (
    AppName,
    Code,
    Fingerprint,
    LetterIds,
    MustReason,
    OneOfQueues,
    Reason,
    Since,
    Task,
    Tenant,
    Until,
    Words,
    letter_filter,
)
from holdfast.cli.letters import changes_text
from holdfast.cli.output import note
from holdfast.cli.parse import edited
from holdfast.cli.prefixes import whole_dead_letter_ids
from holdfast.cli.who import at_work
from holdfast.dlq.many import Report, Result
from holdfast.errors import HoldfastError, InvalidOption, Unavailable

if TYPE_CHECKING:
    from holdfast.core.person import Person
    from holdfast.dlq.letters import Letters


@command(
    dlq,
    "replay",
    examples=(
        "holdfast dlq replay 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'the bank is back'",
        "holdfast dlq replay 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --set amount=12 --set currency=EUR",
        "holdfast dlq replay 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --edit payload.json --app shop.py:app --yes",
        "holdfast dlq replay --fingerprint 9f2c4b1a7d3e5f60 --dry-run",
        "holdfast dlq replay --all --rate 20/s --reason 'after the outage' --yes",
    ),
)
async def replay(
    at: Connection,
    dlq_ids: LetterIds = None,
    edit: Annotated[
        str | None,
        typer.Option("--edit", metavar="FILE", help="The payload instead, as JSON; - is stdin.", show_default=False),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change one argument; repeatable.", show_default=False),
    ] = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    everything: All = False,
    reason: Reason = "",
    rate: Rate = "50/s",
    app: AppName = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Send dead letters back to work, as new jobs: some by their ids, or every open one of a filter, or all.

    The new job's effects are still the first one's. An edited payload is shown beside the old one before anything is
    done. A replay of many can be broken off with Ctrl-C; the same command goes on with the rest.
    """
    ids, per_s = dlq_ids or [], rate_per_s(rate)
    given = (task, queue, tenant, code, fingerprint, since, until, text)
    single = which(ids, filtered=any(value is not None for value in given), everything=everything)
    if (edit is not None or change) and len(ids) != 1:
        raise InvalidOption("--edit and --set are for one letter, by its id")
    async with at_work(at, app) as (offices, person):
        letters = offices.letters
        ids = await whole_dead_letter_ids(offices, person, ids)
        if edit is not None or change:
            report = await _replay_edited(
                letters, person, ids[0], edit, change or [], reason, dry_run=dry_run, yes=yes
            )  # fmt: skip
        elif single:
            report = await _each(
                ids, dry_run, lambda dlq_id: _replay_one(letters, person, dlq_id, reason, None), letters, person
            )  # fmt: skip
        else:
            wanted = await letter_filter(offices, *given, None)
            many = partial(letters.replay_many, person, wanted, reason=reason, rate_per_s=per_s)
            question = f"Replay {{}}, {per_s:g} a second?"
            report = await counted_first(many, question, "dead letter", "replaying", dry_run=dry_run, yes=yes)
    print_report(report, "letter", as_json=as_json)


@command(
    dlq,
    "discard",
    examples=(
        "holdfast dlq discard 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'customer withdrew'",
        "holdfast dlq discard --task newsletter --until 30d --reason 'nobody reads it any more' --dry-run",
    ),
)
async def discard(
    at: Connection,
    dlq_ids: LetterIds = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    everything: All = False,
    reason: MustReason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Ask for dead letters to be thrown away. Somebody else, with a token of their own, has to confirm."""
    given = (task, queue, tenant, code, fingerprint, since, until, text)
    ids = dlq_ids or []
    single = which(ids, filtered=any(value is not None for value in given), everything=everything)
    async with at_work(at) as (offices, person):
        letters = offices.letters

        async def ask(dlq_id: str) -> Result:
            await letters.discard(person, dlq_id, reason)
            return Result(id=dlq_id, done=True)

        if single:
            ids = await whole_dead_letter_ids(offices, person, ids)
            report = await _each(ids, dry_run, ask, letters, person)
        else:
            wanted = await letter_filter(offices, *given, None)
            many = partial(letters.discard_many, person, wanted, reason=reason)
            report = await counted_first(many, "Ask to discard {}?", "dead letter", "asking", dry_run=dry_run, yes=yes)
    print_report(report, "letter", as_json=as_json)


@command(
    dlq,
    "confirm",
    examples=(
        "holdfast dlq confirm 019a2f31c07d7e0ab1c2d3e4f5a6b7c8",
        "holdfast dlq confirm --task newsletter --yes",
    ),
)
async def confirm_discard(
    at: Connection,
    dlq_ids: LetterIds = None,
    task: Task = None,
    queue: OneOfQueues = None,
    tenant: Tenant = None,
    code: Code = None,
    fingerprint: Fingerprint = None,
    since: Since = None,
    until: Until = None,
    text: Words = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Throw dead letters away that another person has asked for. Whoever asked is refused."""
    given = (task, queue, tenant, code, fingerprint, since, until, text)
    ids = dlq_ids or []
    single = which(ids, filtered=any(value is not None for value in given), everything=everything)
    async with at_work(at) as (offices, person):
        letters = offices.letters

        async def agree(dlq_id: str) -> Result:
            await letters.confirm(person, dlq_id)
            return Result(id=dlq_id, done=True)

        if single:
            ids = await whole_dead_letter_ids(offices, person, ids)
            report = await _each(ids, dry_run, agree, letters, person)
        else:
            wanted = await letter_filter(offices, *given, None)
            many = partial(letters.confirm_many, person, wanted)
            report = await counted_first(
                many, "Throw {} away for good?", "dead letter", "discarding", dry_run=dry_run, yes=yes
            )
    print_report(report, "letter", as_json=as_json)


@command(
    dlq,
    "keep",
    examples=("holdfast dlq keep 019a2f31c07d7e0ab1c2d3e4f5a6b7c8 --reason 'we found the customer'",),
)
async def keep(
    at: Connection, dlq_ids: LetterIds = None, reason: Reason = "", dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Dead letters that somebody wants to discard are kept after all, and open again."""
    ids = dlq_ids or []
    which(ids, filtered=False, everything=False)
    async with at_work(at) as (offices, person):

        async def act(dlq_id: str) -> Result:
            await offices.letters.keep(person, dlq_id, reason)
            return Result(id=dlq_id, done=True)

        ids = await whole_dead_letter_ids(offices, person, ids)
        report = await _each(ids, dry_run, act, offices.letters, person)
    print_report(report, "letter", as_json=as_json)


async def _each(
    ids: list[str], dry_run: bool, act: Callable[[str], Awaitable[Result]], letters: Letters, person: Person
) -> Report:
    """Those that were named, one by one; a wrong one hinders no other."""
    chosen = list(dict.fromkeys(ids))
    if dry_run:
        for dlq_id in chosen:
            await letters.show(person, dlq_id)
        return Report(matched=len(chosen), dry_run=True)
    results = []
    for dlq_id in chosen:
        try:
            results.append(await act(dlq_id))
        except HoldfastError as exc:
            if len(chosen) == 1 or isinstance(exc, Unavailable):
                raise
            results.append(Result(id=dlq_id, done=False, code=exc.code, message=str(exc)))
    return Report(matched=len(chosen), dry_run=False, results=results)


async def _replay_edited(
    letters: Letters,
    person: Person,
    dlq_id: str,
    edit: str | None,
    pairs: list[str],
    reason: str,
    *,
    dry_run: bool,
    yes: bool,
) -> Report:
    letter = await letters.show(person, dlq_id)
    payload = edited(letter.payload.text, edit, pairs)
    changes = await letters.diff(person, dlq_id, payload)
    note(changes_text(changes))
    if dry_run:
        return Report(matched=1, dry_run=True)
    confirm(f"Replay {dlq_id} with this payload?", yes=yes)
    return Report(matched=1, dry_run=False, results=[await _replay_one(letters, person, dlq_id, reason, payload)])


async def _replay_one(letters: Letters, person: Person, dlq_id: str, reason: str, payload: bytes | None) -> Result:
    done = await letters.replay(person, dlq_id, reason=reason, payload=payload)
    return Result(id=dlq_id, done=True, job_id=done.job_id)
