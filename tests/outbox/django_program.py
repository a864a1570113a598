"""A Django program, run by `test_django.py` in a separate process: Django's settings are global and final.

    python -m tests.outbox.django_program DATABASE_URL ENGINE_URL NAMESPACE

Prints one JSON object: what each scenario returned, or the error that it raised.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import django
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.cache import cache
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, connection, connections, models, transaction

from holdfast import Holdfast
from holdfast.errors import HoldfastError
from holdfast.outbox.writer import NewOutboxEvent


def database(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path.removeprefix("/")}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.removeprefix("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
    }


DATABASE = sys.argv[1]
SPECIAL = {"transaction_mode": "IMMEDIATE"} if DATABASE.startswith("sqlite:") else {"server_side_binding": True}
settings.configure(
    DATABASES={
        "default": database(DATABASE),
        "special": database(DATABASE) | {"OPTIONS": SPECIAL},
        "elsewhere": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    },
    USE_TZ=True,
    TIME_ZONE="Pacific/Auckland",
)
django.setup()

app = Holdfast(sys.argv[2], ledger=None if sys.argv[2].startswith("sqlite:") else DATABASE, namespace=sys.argv[3])


@app.task(queue="mail")
def double(number: int) -> int:
    return number * 2


class Order(models.Model):
    """A user's row, written in the same transaction."""

    name = models.CharField(max_length=100, unique=True)

    class Meta:
        app_label = "shop"


class Undo(Exception):
    """Raised to roll a block back."""


def orders() -> list[str]:
    return list(Order.objects.order_by("id").values_list("name", flat=True))


def case_a_commit_leaves_order_events_and_job() -> list[str]:
    with transaction.atomic():
        Order.objects.create(name="committed")
        event = app.outbox.add_sync(connection, "orders", key="%s", payload={"note": "100% 'quoted' %(x)s"})
        app.outbox.add_many_sync(connection, [NewOutboxEvent(topic="many", payload=number) for number in range(3)])
        job = double.options(connection=connection).submit_sync(1)
    return [event, job.id]


def case_a_rollback_leaves_nothing() -> list[str]:
    lost = ""
    try:
        with transaction.atomic():
            Order.objects.create(name="lost")
            app.outbox.add_sync(connection, "lost", payload=1)
            lost = double.options(connection=connection).submit_sync(2).id
            raise Undo
    except Undo:
        return [lost]


def case_a_nested_block_is_a_savepoint() -> list[str]:
    lost = ""
    with transaction.atomic():
        kept = double.options(connection=connection).submit_sync(3)
        try:
            with transaction.atomic():
                app.outbox.add_sync(connection, "lost", payload=1)
                lost = double.options(connection=connection).submit_sync(4).id
                raise Undo
        except Undo:
            app.outbox.add_sync(connection, "kept", payload=2)
    return [kept.id, lost]


def case_another_alias_is_used_by_its_name() -> str:
    """With server-side parameter binding, and with the connection wrapper instead of the proxy."""
    chosen = connections["special"]
    with transaction.atomic(using="special"):
        return double.options(connection=chosen).submit_sync(5).id


def case_autocommit_switched_off_manually() -> None:
    connection.set_autocommit(False)
    try:
        app.outbox.add_sync(connection, "lost", payload=1)
        connection.rollback()
        app.outbox.add_sync(connection, "by hand", payload=1)
        connection.commit()
    finally:
        connection.set_autocommit(True)


def case_an_async_view() -> list[str]:
    """The transaction runs in a thread of Django; the view itself cannot use the connection."""

    def order(number: int) -> str:
        with transaction.atomic():
            return double.options(connection=connection).submit_sync(number).id

    async def view() -> list[str]:
        ordered = await sync_to_async(order)(6)
        try:
            app.outbox.add_sync(connection, "lost", payload=1)
        except SynchronousOnlyOperation as exc:
            return [ordered, type(exc).__name__]
        return [ordered]

    return asyncio.run(view())


def case_outside_of_a_transaction() -> None:
    app.outbox.add_sync(connection, "lost", payload=1)


def case_async_call() -> None:
    asyncio.run(app.outbox.add(connection, "lost", payload=1))


def case_a_cache() -> None:
    app.outbox.add_sync(cache, "lost", payload=1)


def case_a_database_without_the_table() -> None:
    with transaction.atomic(using="elsewhere"):
        app.outbox.add_sync(connections["elsewhere"], "lost", payload=1)


def case_an_existing_event_id() -> None:
    for _ in range(2):
        with transaction.atomic():
            app.outbox.add_sync(connection, "once", payload=1, event_id="once")


def case_an_already_broken_block() -> None:
    """Django refuses all statements until the end of the block, including those of the outbox."""
    with transaction.atomic():
        transaction.set_rollback(True)
        app.outbox.add_sync(connection, "lost", payload=1)


def outcome(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except (HoldfastError, DatabaseError) as exc:
        return f"{type(exc).__name__}: {exc}"


def main() -> None:
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    results = {name: outcome(value) for name, value in list(globals().items()) if name.startswith("case_")}
    print(json.dumps(results | {"orders": orders()}))
    connections.close_all()
    asyncio.run(app.close())


if __name__ == "__main__":
    main()
