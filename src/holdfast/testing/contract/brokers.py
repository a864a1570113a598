"""Contract suite for brokers: what `brokers/port.py` requires of every adapter and publisher.

    from holdfast.testing.contract.brokers import BrokerContract, BrokerHarness

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        async def harness(self): ...        # a `BrokerHarness`

`BrokerFaultContract` stops the broker; its harness starts a server that no other test uses.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.errors import BrokerRefused, BrokerUnavailable
from holdfast.testing.contract.broker_harness import (
    EVERY_BYTE,
    SOON_S,
    BrokerHarness,
    BrokerRig,
    by_key,
    equals,
    eventually,
)


class _Suite:
    @pytest.fixture
    async def bench(self, harness: BrokerHarness) -> AsyncIterator[BrokerRig]:
        bench = BrokerRig(harness, await harness.new_queue())
        yield bench
        await bench.close()


class ConnectContract(_Suite):
    """Connecting, closing, health."""

    async def test_an_unreachable_broker_is_reported_at_once(self, harness: BrokerHarness) -> None:
        queue = await harness.new_queue()
        for client in (harness.lost_adapter(queue), harness.lost_publisher()):
            with pytest.raises(BrokerUnavailable) as caught:
                await asyncio.wait_for(client.connect(), SOON_S)
            self.check_secret(harness, str(caught.value))
            assert not await client.health_check()
            await client.close()

    async def test_a_wrong_password_is_reported_at_once_and_not_shown(
        self, harness: BrokerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        adapter = harness.refused_adapter(await harness.new_queue())
        if adapter is None:
            pytest.skip("this broker has no password")
        with pytest.raises(BrokerRefused) as caught:
            await asyncio.wait_for(adapter.connect(), SOON_S)
        await adapter.close()
        self.check_secret(harness, f"{caught.value!r} {caught.value.__cause__!r} {adapter!r} {caplog.text}")

    async def test_no_client_shows_its_password(self, bench: BrokerRig, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        adapter = await bench.adapter()
        publisher = await bench.publisher()
        await bench.publish(b"one")
        await bench.read(adapter).handle(1)
        self.check_secret(bench.harness, f"{adapter!r} {publisher!r} {adapter} {publisher} {caplog.text}")

    async def test_closing_is_safe_twice_and_before_connecting(self, bench: BrokerRig) -> None:
        for client in (bench.harness.adapter(bench.queue), bench.harness.publisher()):
            await client.close()
            await client.close()
        for client in (await bench.adapter(), await bench.publisher()):
            await client.close()
            await client.close()

    async def test_closing_while_connecting_leaves_nothing_behind(self, bench: BrokerRig) -> None:
        adapter = bench.harness.adapter(bench.queue)
        before = asyncio.all_tasks()
        connecting = asyncio.create_task(adapter.connect())
        await asyncio.sleep(0)
        await adapter.close()
        await asyncio.wait({connecting}, timeout=SOON_S)
        failure = connecting.exception()
        assert failure is None or isinstance(failure, BrokerUnavailable)
        await adapter.close()
        left = asyncio.all_tasks() - before
        if left:
            # Tasks of the client that are about to end.
            await asyncio.wait(left, timeout=SOON_S)
        assert not [task for task in left if not task.done()]
        assert not await adapter.health_check()

    async def test_consuming_ends_after_closing(self, bench: BrokerRig) -> None:
        reader = await bench.reader()
        await bench.publish(b"one")
        await reader.one()
        await reader.stop()
        assert reader.task.done()

    async def test_health_check_is_true_if_the_broker_answers(self, bench: BrokerRig) -> None:
        assert await (await bench.adapter()).health_check()
        assert await (await bench.publisher()).health_check()

    def check_secret(self, harness: BrokerHarness, text: str) -> None:
        assert harness.secret is None or harness.secret not in text


class MessageContract(_Suite):
    """Contents of messages, and publishing."""

    async def test_a_message_arrives_as_it_was_published(self, bench: BrokerRig) -> None:
        before = datetime.now(UTC) - timedelta(minutes=1)
        await bench.publish(b'{"n": 1}', key="k-1", x_event_name="order.paid", x_note='ä ö; 日本 = "x"')
        message = await (await bench.reader()).one()
        assert message.body == b'{"n": 1}'
        assert message.key == "k-1"
        assert {name: message.headers[name] for name in ("x-event-name", "x-note")} == {
            "x-event-name": "order.paid",
            "x-note": 'ä ö; 日本 = "x"',
        }
        assert message.message_id
        assert before < message.timestamp < datetime.now(UTC) + timedelta(minutes=1)
        assert message.deliveries == 1
        assert message.metadata

    async def test_header_names_are_lower_case(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", X_Event_Name="paid")
        headers = (await (await bench.reader()).one()).headers
        assert headers["x-event-name"] == "paid"
        assert all(name == name.lower() for name in headers)

    async def test_a_message_needs_neither_key_nor_headers(self, bench: BrokerRig) -> None:
        await bench.publish(b"one")
        message = await (await bench.reader()).one()
        assert (message.body, message.key) == (b"one", "")

    @pytest.mark.parametrize("kind", ["empty", "every byte", "text", "large"])
    async def test_any_body_arrives_unchanged(self, bench: BrokerRig, kind: str) -> None:
        large = (EVERY_BYTE * (bench.harness.large_body // 256 + 1))[: bench.harness.large_body]
        body = {"empty": b"", "every byte": EVERY_BYTE, "text": "grüß dich \n\t\0".encode(), "large": large}[kind]
        await bench.publish(body, key="k")
        message = await (await bench.reader()).one()
        assert len(message.body or b"") == len(body)
        assert message.body == body

    async def test_every_message_has_its_own_id(self, bench: BrokerRig) -> None:
        await bench.publish(*[b"%d" % number for number in range(20)])
        reader = await bench.reader(prefetch=20)
        assert len({message.message_id for message in await reader.handle(20)}) == 20

    async def test_publish_returns_one_result_per_message(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        assert await publisher.publish([]) == []
        assert await publisher.publish([bench.outgoing(b"%d" % number) for number in range(30)]) == [None] * 30
        reader = await bench.reader(prefetch=50)
        assert Counter(message.body for message in await reader.handle(30)) == Counter(
            b"%d" % number for number in range(30)
        )

    async def test_messages_of_one_key_are_published_and_delivered_in_order(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        many = bench.harness.many
        sent = [bench.outgoing(b"%d" % number, key=f"key-{number % 5}") for number in range(many)]
        for batch in (sent[:1], sent[1 : many // 2], sent[many // 2 :]):
            assert await publisher.publish(batch) == [None] * len(batch)
        reader = await bench.reader(prefetch=25)
        received = by_key(await reader.handle(many))
        assert received == {f"key-{key}": [b"%d" % number for number in range(key, many, 5)] for key in range(5)}

    async def test_after_a_failure_no_later_message_of_the_same_key_is_published(self, bench: BrokerRig) -> None:
        impossible = bench.harness.impossible(bench.queue, "a")
        if impossible is None:
            pytest.skip("this broker cannot refuse a single message")
        publisher = await bench.publisher()
        messages = [
            bench.outgoing(b"a1", key="a"),
            impossible,
            bench.outgoing(b"a2", key="a"),
            bench.outgoing(b"b1", key="b"),
        ]
        answers = await publisher.publish(messages)
        assert [answer is None for answer in answers] == [True, False, False, True]
        assert all(answer is None or isinstance(answer, BrokerUnavailable) for answer in answers)
        reader = await bench.reader()
        assert {message.body for message in await reader.handle(2)} == {b"a1", b"b1"}
        await reader.quiet()

    async def test_an_unconnected_publisher_returns_an_error_per_message(self, bench: BrokerRig) -> None:
        publisher = bench.harness.lost_publisher()
        with suppress(BrokerUnavailable):
            await publisher.connect()
        answers = await asyncio.wait_for(publisher.publish([bench.outgoing(b"1"), bench.outgoing(b"2")]), SOON_S)
        assert [type(answer) for answer in answers] == [type(answers[0])] * 2
        assert isinstance(answers[0], BrokerUnavailable)
        await publisher.close()


class DeliveryContract(_Suite):
    """At-least-once delivery and ownership of messages."""

    async def test_messages_published_before_the_group_existed_are_delivered(self, bench: BrokerRig) -> None:
        await bench.publish(b"early")
        assert (await (await bench.reader(group="latecomers")).one()).body == b"early"

    async def test_messages_arrive_while_the_consumer_waits(self, bench: BrokerRig) -> None:
        reader = await bench.reader()
        for number in range(3):
            await bench.publish(b"%d" % number)
            assert (await reader.handle(1))[0].body == b"%d" % number

    async def test_an_acknowledged_message_is_never_redelivered(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two", b"three")
        first = await bench.reader()
        await first.handle(3)
        await first.stop()
        await (await bench.reader()).quiet()

    async def test_unacknowledged_messages_are_redelivered_after_closing(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two", b"three")
        first = await bench.reader()
        received = await first.receive(3)
        (done,) = (message for message in received if message.body == b"one")
        await first.adapter.ack(done)
        await first.stop()
        second = await bench.reader()
        again = await second.handle(2)
        left = {message.message_id: message.body for message in received if message is not done}
        assert {message.message_id: message.body for message in again} == left
        await second.quiet()

    async def test_no_more_than_prefetch_messages_are_in_flight(self, bench: BrokerRig) -> None:
        await bench.publish(*[b"%d" % number for number in range(12)])
        reader = await bench.reader(prefetch=4)
        received = await reader.receive(4)
        await reader.quiet()
        for message in received[:2]:
            await reader.adapter.ack(message)
        received += await reader.receive(2)
        await reader.quiet()
        for message in received[2:]:
            await reader.adapter.ack(message)
        received += await reader.handle(6)
        assert Counter(message.body for message in received) == Counter(b"%d" % number for number in range(12))

    async def test_a_requeued_message_is_redelivered(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", key="k", x_event_name="paid")
        reader = await bench.reader(prefetch=1)
        first = await reader.one()
        await reader.adapter.nack(first, requeue=True)
        assert not reader.adapter.owns(first)
        second = await reader.one()
        assert (second.message_id, second.body, second.key) == (first.message_id, b"one", "k")
        assert second.headers["x-event-name"] == "paid"
        assert reader.adapter.owns(second)
        # The first delivery has ended: its acknowledgement has no effect.
        await reader.adapter.ack(first)
        assert reader.adapter.owns(second)
        await reader.adapter.ack(second)
        await reader.quiet()

    async def test_a_dropped_message_is_not_redelivered(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two")
        reader = await bench.reader(prefetch=2)
        for message in await reader.receive(2):
            await reader.adapter.nack(message)
            assert not reader.adapter.owns(message)
        await reader.quiet()
        await reader.stop()
        await (await bench.reader()).quiet()

    async def test_a_dead_letter_keeps_body_and_headers_and_adds_the_reason(self, bench: BrokerRig) -> None:
        await bench.publish(EVERY_BYTE, key="k", x_event_name="paid")
        reader = await bench.reader()
        message = await reader.one()
        history = ["try 1: the printer is on fire", 'try 2: Grüße, "still"\nburning']
        await reader.adapter.send_to_dlq(message, "no more tries: ünlucky\nprinter", history)
        assert not reader.adapter.owns(message)
        dead_letter = await (await bench.dead_letters()).one()
        assert dead_letter.body == EVERY_BYTE
        assert dead_letter.headers["x-event-name"] == "paid"
        assert dead_letter.headers["x-dead-reason"] == "no more tries: ünlucky\nprinter"
        assert json.loads(dead_letter.headers["x-dead-history"]) == history
        assert dead_letter.headers["x-dead-source"] == bench.queue
        assert dead_letter.headers["x-dead-message-id"] == message.message_id
        await reader.stop()
        await (await bench.reader()).quiet()

    async def test_a_dead_lettered_tombstone_is_still_a_tombstone(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        answers = await publisher.publish([bench.outgoing(None, key="k"), bench.outgoing(b"", key="k")])
        if not bench.harness.tombstones:
            # The next message has the same key and fails with it.
            assert [type(answer) for answer in answers] == [BrokerRefused, type(answers[1])]
            assert answers[1] is not None
            return
        assert answers == [None, None]
        reader = await bench.reader()
        for message, body in zip(await reader.receive(2), (None, b""), strict=True):
            assert message.body == body
            await reader.adapter.send_to_dlq(message, "not wanted")
        dead_letters = await (await bench.dead_letters()).receive(2)
        assert [(message.body, message.key) for message in dead_letters] == [(None, "k"), (b"", "k")]

    async def test_a_message_stays_owned_if_its_dead_letter_cannot_be_written(self, bench: BrokerRig) -> None:
        await bench.publish(b"one")
        reader = await bench.reader()
        message = await reader.one()
        if not await bench.harness.spoil_dead_letters(bench.queue):
            pytest.skip("writes to this broker's dead letters cannot be made to fail")
        with pytest.raises(BrokerUnavailable):
            await asyncio.wait_for(reader.adapter.send_to_dlq(message, "reason"), SOON_S)
        assert reader.adapter.owns(message)
        await reader.stop()
        again = await (await bench.reader()).one()
        assert again.message_id == message.message_id

    async def test_a_message_is_owned_until_it_is_acknowledged_or_the_consumer_closes(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two")
        reader = await bench.reader()
        one, two = await reader.receive(2)
        assert reader.adapter.owns(one)
        await reader.adapter.ack(one)
        assert not reader.adapter.owns(one)
        assert reader.adapter.owns(two)
        await reader.stop()
        assert not reader.adapter.owns(two)

    async def test_acknowledging_a_message_no_longer_owned_changes_nothing(self, bench: BrokerRig) -> None:
        await bench.publish(b"one")
        first = await bench.reader()
        message = await first.one()
        await first.stop()
        second = await bench.reader()
        again = await second.one()
        for requeue in (False, True):
            await second.adapter.nack(message, requeue=requeue)
        await second.adapter.ack(message)
        assert second.adapter.owns(again)
        await second.stop()
        assert (await (await bench.reader()).one()).message_id == message.message_id

    async def test_a_paused_consumer_receives_nothing_until_it_is_resumed(self, bench: BrokerRig) -> None:
        reader = await bench.reader(prefetch=100)
        await bench.publish(b"before")
        await reader.handle(1)
        await reader.adapter.pause()
        await bench.publish(*[b"%d" % number for number in range(10)])
        await reader.quiet()
        await reader.adapter.resume()
        assert {message.body for message in await reader.handle(10)} == {b"%d" % number for number in range(10)}
        await reader.quiet()

    async def test_a_paused_consumer_keeps_its_messages(self, bench: BrokerRig) -> None:
        await bench.publish(b"mine", key="k")
        paused = await bench.reader(prefetch=1)
        message = await paused.one()
        await paused.adapter.pause()
        other = await bench.reader()
        await other.quiet(2.5 * bench.harness.silence_s)
        assert paused.adapter.owns(message)
        await paused.adapter.ack(message)
        await paused.adapter.resume()
        await paused.stop()
        await other.quiet()

    async def test_two_consumers_of_a_group_share_the_messages(self, bench: BrokerRig) -> None:
        readers = [await bench.reader(prefetch=4), await bench.reader(prefetch=4)]
        handled: list[list[str]] = [[], []]
        sent = 0

        async def both_have_some() -> bool:
            nonlocal sent
            if not all(handled):
                fresh = range(sent, sent + 20)
                await bench.publish_each(fresh)
                sent = fresh.stop
            for reader, bodies in zip(readers, handled, strict=True):
                for message in reader.waiting():
                    if reader.adapter.owns(message):
                        await reader.adapter.ack(message)
                        bodies.append((message.body or b"").decode())
            return all(handled) and len({*handled[0], *handled[1]}) == sent

        await eventually(both_have_some)
        assert Counter(handled[0] + handled[1]) == Counter(str(number) for number in range(sent))

    async def test_lag_is_the_number_of_waiting_messages(self, bench: BrokerRig) -> None:
        adapter = await bench.adapter(prefetch=20)
        await bench.publish(*[b"%d" % number for number in range(10)])
        if await adapter.lag() is None:
            pytest.skip("this broker does not report lag")
        await eventually(lambda: equals(adapter.lag, 10))
        await bench.read(adapter).handle(10)
        await eventually(lambda: equals(adapter.lag, 0))


class BrokerContract(ConnectContract, MessageContract, DeliveryContract):
    """The broker contract without outages. Subclasses define a `harness` fixture."""


@pytest.mark.faults
class BrokerFaultContract(_Suite):
    """Outages of the broker. The `harness` has its own server, which keeps what it confirmed."""

    async def test_a_consumer_reconnects_by_itself_and_loses_nothing(self, bench: BrokerRig) -> None:
        reader = await bench.reader()
        await bench.publish(b"done", b"open")
        done, still_open = sorted(await reader.receive(2), key=lambda message: message.body or b"")
        await reader.adapter.ack(done)
        await bench.harness.kill_broker()
        assert not await reader.adapter.health_check()
        assert await reader.adapter.lag() is None
        await bench.harness.start_broker()
        publisher = bench.harness.publisher()
        await publisher.connect()
        assert await publisher.publish([bench.outgoing(b"new")]) == [None]
        received: set[bytes | None] = set()
        while b"new" not in received:
            received.add((await reader.handle(1))[0].body)
        # Either this consumer still owns it, or it is redelivered.
        if reader.adapter.owns(still_open):
            await reader.adapter.ack(still_open)
        elif b"open" not in received:
            received.add((await reader.handle(1))[0].body)
        assert received <= {b"open", b"new"}
        await eventually(reader.adapter.health_check)
        await publisher.close()
        await reader.stop()
        await (await bench.reader()).quiet()

    async def test_a_publisher_reports_an_outage_and_recovers(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        await bench.publish(b"before")
        await bench.harness.kill_broker()
        answers = await asyncio.wait_for(
            publisher.publish([bench.outgoing(b"%d" % number, key="k") for number in range(3)]), SOON_S
        )
        assert [isinstance(answer, BrokerUnavailable) for answer in answers] == [True] * 3
        assert not await publisher.health_check()
        await bench.harness.start_broker()

        async def published() -> bool:
            return await publisher.publish([bench.outgoing(b"after", key="k")]) == [None]

        await eventually(published)
        assert await publisher.health_check()
        reader = await bench.reader()
        received = {message.body for message in await reader.handle(2)}
        while b"after" not in received:
            received |= {message.body for message in await reader.handle(1)}
        assert b"before" in received
