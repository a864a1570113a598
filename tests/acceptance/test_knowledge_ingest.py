"""Source I's acceptance (requirements X5, O3): the example `knowledge_ingest` on real Redis, PostgreSQL, Chroma and
Kafka, with a real model; every part is a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import redis

from holdfast.verification.chaos.servers import in_own_loop
from tests.acceptance.chroma_server import ChromaServer
from tests.acceptance.knowledge_deployment import APP, FOLDER, KnowledgeDeployment
from tests.acceptance.workflow_deployment import wait_until
from tests.brokers.kafka_server import KafkaServer
from tests.conftest import MakeServer
from tests.servers import find_server
from tools.servers import CHROMA, KAFKA, MINILM, MINILM_TOKENS

#: Each test starts processes, which is slow on a busy machine.
pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.slow]

FERRY = "The ferry to the island leaves the northern pier at seven each morning, and only when the wind is weak."
BREAD = "Sourdough needs a long, cool rest overnight before it goes into a very hot oven."
LEAVE = "Employees may carry over at most five unused days of holiday into the next calendar year."
#: Questions that share no significant word with the text that answers them.
QUESTIONS = {
    "When does the boat sail to the isle?": FERRY,
    "How long must dough prove prior to baking?": BREAD,
    "How much leftover vacation can staff keep?": LEAVE,
}
DOCUMENTS = {"ferry": FERRY, "bread": BREAD}

MakeDeployment = Callable[..., KnowledgeDeployment]


@pytest.fixture
def chroma(tmp_path: Path) -> Iterator[ChromaServer]:
    """Not started yet: its port is closed."""
    server = ChromaServer(find_server(CHROMA), tmp_path / "chroma")
    yield server
    server.stop()


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaServer]:
    """Not started yet."""
    server = KafkaServer(find_server(KAFKA), tmp_path / "kafka")
    yield server
    server.remove()


@pytest.fixture
def redis_store(make_redis: MakeServer) -> str:
    """A separate Redis: the example's keys have no namespace."""
    return make_redis().url


@pytest.fixture
def deploy(tmp_path: Path, redis_store: str, postgres_url: str, chroma: ChromaServer) -> Iterator[MakeDeployment]:
    made: list[KnowledgeDeployment] = []
    for file in (MINILM, MINILM_TOKENS):
        find_server(file)

    def make(**settings: str) -> KnowledgeDeployment:
        made.append(KnowledgeDeployment(tmp_path / "knowledge", redis_store, postgres_url, chroma.url, **settings))
        return made[-1]

    yield make
    for knowledge in made:
        knowledge.stop()


def test_a_paraphrase_finds_the_document_and_a_replay_keeps_the_count(
    deploy: MakeDeployment, chroma: ChromaServer
) -> None:
    """Mode `redis`, with the worker in the web process."""
    knowledge = deploy(HOLDFAST_HTTP_WORKER="true")
    knowledge.start_web()
    chroma.start()
    knowledge.wait_for_web()
    texts = [FERRY, BREAD, LEAVE, " ".join([FERRY, BREAD] * 6)]
    uploads = [knowledge.upload(text, title=text[:20], documentId=f"d{n}") for n, text in enumerate(texts)]
    for upload in uploads:
        done = knowledge.wait_status(upload["taskId"], "SUCCEEDED")
        assert (done["attemptCount"], done["nextRetryAt"], done["lastError"], done["errorMessage"]) == (0,) + (
            None,
        ) * 3
    assert len(chroma.records("d3")) > 1
    count = chroma.count()
    assert count == 3 + len(chroma.records("d3"))
    for question, text in QUESTIONS.items():
        best, *others = [found for found in knowledge.search(question) if found["documentId"] != "d3"]
        assert best["text"] == text
        assert all(best["similarity"] > other["similarity"] + 0.2 for other in others)
    # A repeated upload overwrites the records.
    again = [knowledge.upload(text, title=text[:20], documentId=f"d{n}") for n, text in enumerate(texts)]
    assert {upload["taskId"] for upload in again}.isdisjoint(upload["taskId"] for upload in uploads)
    for upload in again:
        knowledge.wait_status(upload["taskId"], "SUCCEEDED")
    assert chroma.count() == count
    # A new text of the document replaces all records of the old one.
    knowledge.wait_status(knowledge.upload(LEAVE, documentId="d3")["taskId"], "SUCCEEDED")
    assert chroma.records("d3") == [LEAVE]
    assert knowledge.get("/api/knowledge/tasks/unknown").status_code == 404


def test_x5_1_an_unreachable_vector_store(
    deploy: MakeDeployment, chroma: ChromaServer, redis_store: str, postgres_url: str
) -> None:
    knowledge = deploy(
        INGEST_REDIS_MAX_ATTEMPTS="2",
        INGEST_REDIS_RETRY_BASE_BACKOFF_MS="0",
        INGEST_REDIS_RETRY_MAX_BACKOFF_MS="0",
        INGEST_REDIS_RECLAIM_IDLE_MS="0",
        # A failed task stays pending until a worker that reclaims is started below.
        INGEST_REDIS_RECLAIM_ENABLED="false",
        HOLDFAST_HTTP_WORKER="true",
        HOLDFAST_HTTP_UPKEEP="false",
    )
    knowledge.start_web()
    knowledge.wait_for_web()
    task_id = knowledge.upload(FERRY)["taskId"]

    failed = knowledge.wait_status(task_id, "RETRYING")
    assert failed["attemptCount"] == 1
    assert failed["nextRetryAt"]
    assert "onnect" in failed["lastError"]
    assert failed["errorMessage"] == failed["lastError"]
    assert (count_pending(redis_store), count_dead_letters(redis_store)) == (1, 0)

    knowledge.start("worker", APP, INGEST_REDIS_RECLAIM_ENABLED="true")
    dead = knowledge.wait_status(task_id, "DEAD")
    assert (dead["attemptCount"], dead["nextRetryAt"]) == (2, None)
    assert "onnect" in dead["errorMessage"]
    wait_until(lambda: sql(postgres_url, "SELECT 1 FROM jobs WHERE state = 'failed'"), "the final event in the ledger")
    assert (count_pending(redis_store), count_dead_letters(redis_store)) == (0, 1)
    moves = "SELECT from_state, to_state, attempt, retry_count FROM job_events WHERE to_state IS NOT NULL ORDER BY seq"
    assert sql(postgres_url, moves) == [
        (None, "queued", 0, 0),
        ("queued", "running", 1, 0),
        ("running", "retrying", 1, 1),
        ("retrying", "running", 2, 1),
        ("running", "dlq_pending", 2, 1),
        ("dlq_pending", "dlq_recorded", 2, 1),
        ("dlq_recorded", "failed", 2, 1),
    ]
    assert 'ingest_task_process_total{result="retry"} 1.0' in knowledge.get("/holdfast/metrics").text

    # Nothing is lost: once the store is up, an operator replays the dead letter.
    chroma.start()
    knowledge.holdfast("dlq", "replay", "--all", "--app", APP, "--reason", "the store is back", "--yes")
    wait_until(lambda: chroma.count() == 1, "the document to be stored")


def test_x5_2_unreachable_brokers(
    kafka: KafkaServer, deploy: MakeDeployment, chroma: ChromaServer, postgres_url: str
) -> None:
    """Mode `kafka`, whose brokers start later; covers requirement O3 too."""
    record_event_changes(postgres_url)
    knowledge = deploy(
        INGEST_QUEUE="kafka",
        KAFKA_BOOTSTRAP_SERVERS=kafka.address,
        KAFKA_CONNECT_TIMEOUT_MS="500",
        INGEST_KAFKA_MAX_ATTEMPTS="2",
        INGEST_KAFKA_RETRY_BASE_BACKOFF_MS="0",
        INGEST_KAFKA_RETRY_MAX_BACKOFF_MS="0",
        HOLDFAST_HTTP_WORKER="true",
    )
    knowledge.start_web()
    chroma.start()
    knowledge.wait_for_web()
    ferry, bread = (knowledge.upload(text, documentId=name)["taskId"] for name, text in DOCUMENTS.items())
    assert sql(postgres_url, "SELECT document_id, text FROM knowledge_documents ORDER BY 1 DESC") == [
        *DOCUMENTS.items()
    ]
    wait_events(postgres_url, "DEAD")
    for task_id in (ferry, bread):
        assert find_changes(postgres_url, task_id) == [("RETRYING", 1, True), ("DEAD", 2, False)]
        response = knowledge.task(task_id)
        assert (response["status"], response["outbox"]["attemptCount"], response["outbox"]["nextRetryAt"]) == (
            "QUEUED",
            2,
            None,
        )
        assert response["outbox"]["lastError"]

    kafka.start()
    assert knowledge.holdfast("outbox", "retry", "--all-dead", "--reason", "Kafka is back").split()[0] == "2"
    wait_events(postgres_url, "SENT")
    assert (
        sql(postgres_url, "SELECT attempt_count, last_error FROM outbox_events WHERE sent_at IS NOT NULL")
        == [(0, None)] * 2
    )
    knowledge.start("trigger", "run", str(FOLDER / "trigger.yaml"), APP)
    for task_id in (ferry, bread):
        assert knowledge.wait_status(task_id, "SUCCEEDED")["outbox"] is None
    assert knowledge.search("When does the boat sail to the isle?")[0]["documentId"] == "ferry"
    assert chroma.count() == 2

    # A relay that dies between publishing and recording it publishes again: no second job, no second record.
    sql(postgres_url, "UPDATE outbox_events SET status = 'NEW', sent_at = NULL")
    wait_until(lambda: len(list_message_statuses(postgres_url)) == 4, "both messages to be delivered again")
    assert sorted(list_message_statuses(postgres_url)) == ["duplicate", "duplicate", "success", "success"]
    assert sql(postgres_url, "SELECT count(*) FROM jobs") == [(2,)]
    assert chroma.count() == 2


def wait_events(url: str, status: str) -> None:
    others = f"SELECT 1 FROM outbox_events WHERE status <> '{status}'"
    wait_until(lambda: not sql(url, others), f"the events to be {status}")


def record_event_changes(url: str) -> None:
    """Record every state of an event, because some last only briefly."""
    for statement in (
        "CREATE TABLE changes (n serial, id text, status text, attempt_count integer, due boolean)",
        """CREATE FUNCTION record_change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               INSERT INTO changes (id, status, attempt_count, due)
               VALUES (NEW.id, NEW.status, NEW.attempt_count, NEW.next_retry_at IS NOT NULL);
               RETURN NULL;
           END $$""",
        "CREATE TRIGGER recorded AFTER UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION record_change()",
    ):
        sql(url, statement)


def find_changes(url: str, event_id: str) -> list[tuple[Any, ...]]:
    return sql(url, f"SELECT status, attempt_count, due FROM changes WHERE id = '{event_id}' ORDER BY n")


def list_message_statuses(url: str) -> list[str]:
    return [row[0] for row in sql(url, "SELECT status FROM queue_executions WHERE queue_name = 'ingest-tasks'")]


def count_pending(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        response: Any = client.xpending("ingest:tasks", "ingest-workers")
        return int(response["pending"])


def count_dead_letters(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.xlen("ingest:tasks:dlq"))


def sql(url: str, query: str) -> list[tuple[Any, ...]]:
    async def fetch() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(url)
        try:
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    return in_own_loop(fetch)
