"""The behaviour that every broker's adapter and publisher must show, sentence by sentence of `brokers/port.py`.

    from holdfast.testing.contract.brokers import BrokerContract, BrokerHarness

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        async def harness(self): ...        # a `BrokerHarness`

`BrokerFaultContract` is the part that takes the broker down; its harness starts a server that no other test uses.
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

    async def test_a_broker_that_is_not_there_is_told_at_once(self, harness: BrokerHarness) -> None:
        queue = await harness.new_queue()
        for client in (harness.lost_adapter(queue), harness.lost_publisher()):
            with pytest.raises(BrokerUnavailable) as caught:
                await asyncio.wait_for(client.connect(), SOON_S)
            self.check_secret(harness, str(caught.value))
            assert not await client.health_check()
            await client.close()

    async def test_a_wrong_password_is_told_at_once_and_not_shown(
        self, harness: BrokerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        adapter = harness.refused_adapter(await harness.new_queue())
        if adapter is None:
            pytest.skip("this broker asks for no password")
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

    async def test_closed_while_it_connects_it_leaves_nothing_behind(self, bench: BrokerRig) -> None:
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
            # Those of the client's own, on their way out.
            await asyncio.wait(left, timeout=SOON_S)
        assert not [task for task in left if not task.done()]
        assert not await adapter.health_check()

    async def test_consuming_ends_after_closing(self, bench: BrokerRig) -> None:
        reader = await bench.reader()
        await bench.publish(b"one")
        await reader.one()
        await reader.stop()
        assert reader.task.done()

    async def test_health_says_that_the_broker_answers(self, bench: BrokerRig) -> None:
        assert await (await bench.adapter()).health_check()
        assert await (await bench.publisher()).health_check()

    def check_secret(self, harness: BrokerHarness, text: str) -> None:
        assert harness.secret is None or harness.secret not in text


class MessageContract(_Suite):
    """What a message carries, and what is published."""

    async def test_a_message_comes_as_it_was_published(self, bench: BrokerRig) -> None:
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

    async def test_names_of_headers_are_lower_case(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", X_Event_Name="paid")
        headers = (await (await bench.reader()).one()).headers
        assert headers["x-event-name"] == "paid"
        assert all(name == name.lower() for name in headers)

    async def test_a_message_needs_neither_key_nor_headers(self, bench: BrokerRig) -> None:
        await bench.publish(b"one")
        message = await (await bench.reader()).one()
        assert (message.body, message.key) == (b"one", "")

    @pytest.mark.parametrize("kind", ["empty", "every byte", "text", "large"])
    async def test_any_body_goes_through_unchanged(self, bench: BrokerRig, kind: str) -> None:
        large = (EVERY_BYTE * (bench.harness.large_body // 256 + 1))[: bench.harness.large_body]
        body = {"empty": b"", "every byte": EVERY_BYTE, "text": "grüß dich \n\t\0".encode(), "large": large}[kind]
        await bench.publish(body, key="k")
        message = await (await bench.reader()).one()
        assert len(message.body or b"") == len(body)
        assert message.body == body

    async def test_every_message_has_an_id_of_its_own(self, bench: BrokerRig) -> None:
        await bench.publish(*[b"%d" % number for number in range(20)])
        reader = await bench.reader(prefetch=20)
        assert len({message.message_id for message in await reader.handle(20)}) == 20

    async def test_publishing_answers_for_each(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        assert await publisher.publish([]) == []
        assert await publisher.publish([bench.outgoing(b"%d" % number) for number in range(30)]) == [None] * 30
        reader = await bench.reader(prefetch=50)
        assert Counter(message.body for message in await reader.handle(30)) == Counter(
            b"%d" % number for number in range(30)
        )

    async def test_messages_of_one_key_are_written_and_come_in_order(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        many = bench.harness.many
        sent = [bench.outgoing(b"%d" % number, key=f"key-{number % 5}") for number in range(many)]
        for batch in (sent[:1], sent[1 : many // 2], sent[many // 2 :]):
            assert await publisher.publish(batch) == [None] * len(batch)
        reader = await bench.reader(prefetch=25)
        came = by_key(await reader.handle(many))
        assert came == {f"key-{key}": [b"%d" % number for number in range(key, many, 5)] for key in range(5)}

    async def test_after_one_that_failed_no_later_one_of_its_key_is_written(self, bench: BrokerRig) -> None:
        impossible = bench.harness.impossible(bench.queue, "a")
        if impossible is None:
            pytest.skip("this broker refuses no single message")
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

    async def test_a_publisher_that_is_not_connected_says_so_for_each(self, bench: BrokerRig) -> None:
        publisher = bench.harness.lost_publisher()
        with suppress(BrokerUnavailable):
            await publisher.connect()
        answers = await asyncio.wait_for(publisher.publish([bench.outgoing(b"1"), bench.outgoing(b"2")]), SOON_S)
        assert [type(answer) for answer in answers] == [type(answers[0])] * 2
        assert isinstance(answers[0], BrokerUnavailable)
        await publisher.close()


class DeliveryContract(_Suite):
    """At least once, and who holds what."""

    async def test_what_was_written_before_the_group_began_is_delivered(self, bench: BrokerRig) -> None:
        await bench.publish(b"early")
        assert (await (await bench.reader(group="latecomers")).one()).body == b"early"

    async def test_messages_come_while_the_consumer_waits(self, bench: BrokerRig) -> None:
        reader = await bench.reader()
        for number in range(3):
            await bench.publish(b"%d" % number)
            assert (await reader.handle(1))[0].body == b"%d" % number

    async def test_what_is_acknowledged_never_comes_again(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two", b"three")
        first = await bench.reader()
        await first.handle(3)
        await first.stop()
        await (await bench.reader()).quiet()

    async def test_what_is_not_acknowledged_comes_again_after_closing(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two", b"three")
        first = await bench.reader()
        taken = await first.take(3)
        (done,) = (message for message in taken if message.body == b"one")
        await first.adapter.ack(done)
        await first.stop()
        second = await bench.reader()
        again = await second.handle(2)
        left = {message.message_id: message.body for message in taken if message is not done}
        assert {message.message_id: message.body for message in again} == left
        await second.quiet()

    async def test_no_more_than_prefetch_are_in_hand(self, bench: BrokerRig) -> None:
        await bench.publish(*[b"%d" % number for number in range(12)])
        reader = await bench.reader(prefetch=4)
        taken = await reader.take(4)
        await reader.quiet()
        for message in taken[:2]:
            await reader.adapter.ack(message)
        taken += await reader.take(2)
        await reader.quiet()
        for message in taken[2:]:
            await reader.adapter.ack(message)
        taken += await reader.handle(6)
        assert Counter(message.body for message in taken) == Counter(b"%d" % number for number in range(12))

    async def test_a_refused_message_to_be_requeued_comes_again(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", key="k", x_event_name="paid")
        reader = await bench.reader(prefetch=1)
        first = await reader.one()
        await reader.adapter.nack(first, requeue=True)
        assert not reader.adapter.owns(first)
        second = await reader.one()
        assert (second.message_id, second.body, second.key) == (first.message_id, b"one", "k")
        assert second.headers["x-event-name"] == "paid"
        assert reader.adapter.owns(second)
        # The first delivery is over: what it says now does not count.
        await reader.adapter.ack(first)
        assert reader.adapter.owns(second)
        await reader.adapter.ack(second)
        await reader.quiet()

    async def test_a_refused_message_that_is_dropped_comes_no_more(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two")
        reader = await bench.reader(prefetch=2)
        for message in await reader.take(2):
            await reader.adapter.nack(message)
            assert not reader.adapter.owns(message)
        await reader.quiet()
        await reader.stop()
        await (await bench.reader()).quiet()

    async def test_a_dead_letter_keeps_body_and_headers_and_says_why(self, bench: BrokerRig) -> None:
        await bench.publish(EVERY_BYTE, key="k", x_event_name="paid")
        reader = await bench.reader()
        message = await reader.one()
        history = ["try 1: the printer is on fire", 'try 2: Grüße, "still"\nburning']
        await reader.adapter.send_to_dlq(message, "no more tries: ünlucky\nprinter", history)
        assert not reader.adapter.owns(message)
        letter = await (await bench.dead_letters()).one()
        assert letter.body == EVERY_BYTE
        assert letter.headers["x-event-name"] == "paid"
        assert letter.headers["x-dead-reason"] == "no more tries: ünlucky\nprinter"
        assert json.loads(letter.headers["x-dead-history"]) == history
        assert letter.headers["x-dead-source"] == bench.queue
        assert letter.headers["x-dead-message-id"] == message.message_id
        await reader.stop()
        await (await bench.reader()).quiet()

    async def test_a_tombstone_stays_one_among_the_dead_letters(self, bench: BrokerRig) -> None:
        publisher = await bench.publisher()
        answers = await publisher.publish([bench.outgoing(None, key="k"), bench.outgoing(b"", key="k")])
        if not bench.harness.tombstones:
            # The one after it has the same key.
            assert [type(answer) for answer in answers] == [BrokerRefused, type(answers[1])]
            assert answers[1] is not None
            return
        assert answers == [None, None]
        reader = await bench.reader()
        for message, body in zip(await reader.take(2), (None, b""), strict=True):
            assert message.body == body
            await reader.adapter.send_to_dlq(message, "not wanted")
        letters = await (await bench.dead_letters()).take(2)
        assert [(letter.body, letter.key) for letter in letters] == [(None, "k"), (b"", "k")]

    async def test_a_dead_letter_that_cannot_be_written_leaves_the_message_with_us(self, bench: BrokerRig) -> None:
        await bench.publish(b"one")
        reader = await bench.reader()
        message = await reader.one()
        if not await bench.harness.spoil_dead_letters(bench.queue):
            pytest.skip("this broker's dead letters cannot be spoiled")
        with pytest.raises(BrokerUnavailable):
            await asyncio.wait_for(reader.adapter.send_to_dlq(message, "why"), SOON_S)
        assert reader.adapter.owns(message)
        await reader.stop()
        again = await (await bench.reader()).one()
        assert again.message_id == message.message_id

    async def test_a_message_is_ours_until_we_are_done_with_it(self, bench: BrokerRig) -> None:
        await bench.publish(b"one", b"two")
        reader = await bench.reader()
        one, two = await reader.take(2)
        assert reader.adapter.owns(one)
        await reader.adapter.ack(one)
        assert not reader.adapter.owns(one)
        assert reader.adapter.owns(two)
        await reader.stop()
        assert not reader.adapter.owns(two)

    async def test_to_acknowledge_what_is_no_longer_ours_changes_nothing(self, bench: BrokerRig) -> None:
        await bench.publish(b"one")
        first = await bench.reader()
        message = await first.one()
        await first.stop()
        second = await bench.reader()
        again = await second.one()
        for refuse in (False, True):
            await second.adapter.nack(message, requeue=refuse)
        await second.adapter.ack(message)
        assert second.adapter.owns(again)
        await second.stop()
        assert (await (await bench.reader()).one()).message_id == message.message_id

    async def test_while_paused_nothing_comes_and_afterwards_everything(self, bench: BrokerRig) -> None:
        reader = await bench.reader(prefetch=100)
        await bench.publish(b"before")
        await reader.handle(1)
        await reader.adapter.pause()
        await bench.publish(*[b"%d" % number for number in range(10)])
        await reader.quiet()
        await reader.adapter.resume()
        assert {message.body for message in await reader.handle(10)} == {b"%d" % number for number in range(10)}
        await reader.quiet()

    async def test_a_paused_consumer_keeps_what_it_has(self, bench: BrokerRig) -> None:
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

    async def test_two_consumers_of_a_group_share(self, bench: BrokerRig) -> None:
        readers = [await bench.reader(prefetch=4), await bench.reader(prefetch=4)]
        handled: list[list[str]] = [[], []]
        sent = 0

        async def both_have_some() -> bool:
            nonlocal sent
            if not all(handled):
                fresh = range(sent, sent + 20)
                await bench.publish_each(fresh)
                sent = fresh.stop
            for reader, mine in zip(readers, handled, strict=True):
                for message in reader.waiting():
                    if reader.adapter.owns(message):
                        await reader.adapter.ack(message)
                        mine.append((message.body or b"").decode())
            return all(handled) and len({*handled[0], *handled[1]}) == sent

        await eventually(both_have_some)
        assert Counter(handled[0] + handled[1]) == Counter(str(number) for number in range(sent))

    async def test_lag_says_how_many_wait(self, bench: BrokerRig) -> None:
        adapter = await bench.adapter(prefetch=20)
        await bench.publish(*[b"%d" % number for number in range(10)])
        if await adapter.lag() is None:
            pytest.skip("this broker does not say")
        await eventually(lambda: equals(adapter.lag, 10))
        await bench.read(adapter).handle(10)
        await eventually(lambda: equals(adapter.lag, 0))


class BrokerContract(ConnectContract, MessageContract, DeliveryContract):
    """All of it that leaves the broker standing. Give it a `harness` fixture."""


@pytest.mark.faults
class BrokerFaultContract(_Suite):
    """The broker goes away and comes back. Its `harness` has a server of its own, which keeps what it confirmed."""

    async def test_a_consumer_comes_back_by_itself_and_loses_nothing(self, bench: BrokerRig) -> None:
        reader = await bench.reader()
        await bench.publish(b"done", b"open")
        done, still_open = sorted(await reader.take(2), key=lambda message: message.body or b"")
        await reader.adapter.ack(done)
        await bench.harness.kill_broker()
        assert not await reader.adapter.health_check()
        assert await reader.adapter.lag() is None
        await bench.harness.start_broker()
        publisher = bench.harness.publisher()
        await publisher.connect()
        assert await publisher.publish([bench.outgoing(b"new")]) == [None]
        came: set[bytes | None] = set()
        while b"new" not in came:
            came.add((await reader.handle(1))[0].body)
        # Either it is still ours, or it is delivered once more.
        if reader.adapter.owns(still_open):
            await reader.adapter.ack(still_open)
        elif b"open" not in came:
            came.add((await reader.handle(1))[0].body)
        assert came <= {b"open", b"new"}
        await eventually(reader.adapter.health_check)
        await publisher.close()
        await reader.stop()
        await (await bench.reader()).quiet()

    async def test_a_publisher_says_that_the_broker_is_down_and_comes_back(self, bench: BrokerRig) -> None:
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
        came = {message.body for message in await reader.handle(2)}
        while b"after" not in came:
            came |= {message.body for message in await reader.handle(1)}
        assert b"before" in came
