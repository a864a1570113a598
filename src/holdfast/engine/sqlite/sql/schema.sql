-- schema: the whole store, engine and embedded ledger in one file.
-- Run once, in one transaction, on an empty file. {{…}} are generated from core/states.py. The ledger's tables that the
-- engine does not write (effects, steps, approvals …) and the ledger's indexes come from ledger/schema.py: `ledger_tables.py`.
-- Instants are milliseconds since the epoch, UTC. Payload, result, meta, history and data are JSON text.

-- An active job is exactly one of: ready (ordered by `ready_seq`), waiting for a time (`due_at`), or leased
-- (`lease_expires_at`; for a retry that waits in the pending list this is its due time).
-- A lease is (id, claim_seq, deliveries, worker): `claim_seq` counts the claims of this row, `deliveries` the leases of one
-- claim. `previous_state` is the state before this one: every statement that sets the state sets it too, and the last CHECK
-- repeats the state table, as protection against errors in the code.
CREATE TABLE jobs (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id       TEXT    NOT NULL DEFAULT 'default',
    job_id          TEXT    NOT NULL,
    job_type        TEXT    NOT NULL,
    queue           TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    previous_state  TEXT,
    priority        INTEGER NOT NULL CHECK (priority IN ({{priorities}})),
    attempt         INTEGER NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    retry_count     INTEGER GENERATED ALWAYS AS (coalesce(json_extract(meta, '$.retry_count'), 0)) VIRTUAL,
    idempotency_key TEXT    NOT NULL DEFAULT '',
    trace_id        TEXT    NOT NULL DEFAULT '',
    error_code      TEXT,
    last_error      TEXT,
    error_message   TEXT,
    run_at          INTEGER,
    next_retry_at   INTEGER,
    dlq_id          TEXT,
    webhook         TEXT    GENERATED ALWAYS AS (json_extract(meta, '$.webhook')) VIRTUAL,
    notified_at     INTEGER,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    ready_seq       INTEGER,
    due_at          INTEGER,
    lease_expires_at INTEGER,
    worker          TEXT,
    claim_seq       INTEGER NOT NULL DEFAULT 0,
    deliveries      INTEGER NOT NULL DEFAULT 0,
    claimed_at      INTEGER,
    token           TEXT,
    schema_fingerprint TEXT,
    last_seq        INTEGER NOT NULL DEFAULT 0,
    meta            TEXT,
    context         TEXT    GENERATED ALWAYS AS (json_extract(meta, '$.context')) VIRTUAL,
    result          TEXT,
    payload         TEXT    NOT NULL,
    CHECK ((finished_at IS NOT NULL) = (state IN ({{final}}))),
    CHECK ((ready_seq IS NOT NULL) + (due_at IS NOT NULL) + (lease_expires_at IS NOT NULL) = (state IN ({{active}}))),
    CHECK ((worker IS NOT NULL) = (state = 'running')),
    CHECK (state <> 'running' OR lease_expires_at IS NOT NULL),
    -- A dead letter comes before the state that says it is there (requirement D1).
    CONSTRAINT dead_letter CHECK (dlq_id IS NOT NULL OR state <> 'dlq_recorded' AND state <> 'failed'),
    CONSTRAINT legal_move CHECK ({{legal}})
);
CREATE UNIQUE INDEX jobs_by_job_id ON jobs (job_id, queue);
-- Tenants share a priority fairly: the ready jobs of each are contiguous in this index.
CREATE INDEX jobs_ready ON jobs (queue, priority, tenant_id, ready_seq, state) WHERE ready_seq IS NOT NULL;
CREATE INDEX jobs_due ON jobs (queue, due_at, state) WHERE due_at IS NOT NULL;
CREATE INDEX jobs_leased ON jobs (queue, lease_expires_at, state, tenant_id) WHERE lease_expires_at IS NOT NULL;
CREATE INDEX jobs_parked ON jobs (queue, state) WHERE state IN ({{parked}});
CREATE INDEX jobs_finished ON jobs (queue, finished_at, state) WHERE finished_at IS NOT NULL;
-- For the ledger's queries, in addition to the ledger's own indexes: keys that callers passed; and jobs that are neither ready,
-- nor leased, nor ordinary successes. OR, not IN: only so can SQLite use the index for a single state.
CREATE INDEX jobs_by_key ON jobs (tenant_id, idempotency_key) WHERE idempotency_key <> job_id AND idempotency_key <> '';
CREATE INDEX jobs_by_state ON jobs (tenant_id, state, created_at, job_id) WHERE {{indexed}};

-- The history of every job; `id` is the feed position, `job_row` the row of the job. What the job's row contains (most of
-- the envelope of a creation, the result of a success) is not copied into `data`. Audit events are in the feed, but in the
-- history of no job: their `job_row` is 0, and `data` names the target.
CREATE TABLE events (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    job_row     INTEGER NOT NULL,
    seq         INTEGER NOT NULL CHECK (seq > 0),
    type        TEXT    NOT NULL,
    from_state  TEXT,
    to_state    TEXT,
    attempt     INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    worker      TEXT    NOT NULL DEFAULT '',
    message     TEXT    NOT NULL DEFAULT '',
    data        TEXT,
    at          INTEGER NOT NULL
);
CREATE UNIQUE INDEX events_by_job ON events (job_row, seq);
-- The events as the ledger's queries read them, with complete data.
CREATE VIEW job_events AS
SELECT event.id, jobs.tenant_id, jobs.job_id, jobs.queue, event.job_row, event.seq, event.type, event.from_state,
       event.to_state, event.attempt, event.retry_count, event.worker, event.message, {{event_data}} AS data, event.at
  FROM events AS event JOIN jobs ON jobs.id = event.job_row;

-- One atomic step of one queue: the events first_event..position. `total_bytes` is a running sum of `bytes`; `urgent`:
-- a durable submission waits for it.
CREATE TABLE feed_entries (
    queue       TEXT    NOT NULL,
    position    INTEGER NOT NULL,
    first_event INTEGER NOT NULL,
    nonce       TEXT    NOT NULL,
    bytes       INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL,
    urgent      INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, position)
) WITHOUT ROWID;
CREATE TABLE feed_readers (
    queue         TEXT PRIMARY KEY,
    position      INTEGER NOT NULL DEFAULT 0,
    registered_at INTEGER NOT NULL
) WITHOUT ROWID;

-- Which job came first under a key (requirement E1). Jobs without a key are found by their id.
CREATE TABLE submission_keys (
    tenant_id   TEXT    NOT NULL,
    queue       TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    job_id      TEXT    NOT NULL,
    expires_at  INTEGER NOT NULL,
    -- Of the first job's task and arguments; '' if not known.
    fingerprint TEXT    NOT NULL DEFAULT '',
    PRIMARY KEY (tenant_id, queue, key)
) WITHOUT ROWID;
CREATE INDEX submission_keys_by_expiry ON submission_keys (queue, expires_at);

CREATE TABLE dlq_items (
    tenant_id    TEXT    NOT NULL,
    dlq_id       TEXT    NOT NULL,
    job_id       TEXT    NOT NULL,
    job_type     TEXT    NOT NULL,
    queue        TEXT    NOT NULL,
    trace_id     TEXT    NOT NULL DEFAULT '',
    payload      TEXT    NOT NULL,
    error_code   TEXT    NOT NULL,
    error        TEXT    NOT NULL,
    stack        TEXT    NOT NULL DEFAULT '',
    retry_count  INTEGER NOT NULL,
    history      TEXT    NOT NULL,
    failed_at    INTEGER NOT NULL,
    status       TEXT    NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'discard_requested', 'discarded', 'replayed')),
    requested_by TEXT,
    confirmed_by TEXT,
    reason       TEXT,
    replayed_as  TEXT,
    replay_count INTEGER NOT NULL DEFAULT 0,
    replay_payload TEXT,
    replay_pending INTEGER NOT NULL DEFAULT 0,
    fingerprint  TEXT    NOT NULL DEFAULT '',
    acked_at     INTEGER,
    PRIMARY KEY (tenant_id, dlq_id)
) WITHOUT ROWID;
CREATE INDEX dlq_items_by_queue ON dlq_items (queue, failed_at);
CREATE INDEX dlq_items_by_job ON dlq_items (tenant_id, job_id, queue);
CREATE INDEX dlq_items_by_time ON dlq_items (tenant_id, failed_at, dlq_id);
CREATE INDEX dlq_items_by_fingerprint ON dlq_items (tenant_id, fingerprint, failed_at);
CREATE INDEX dlq_items_replaying ON dlq_items (tenant_id, dlq_id) WHERE replay_pending = 1;

-- `tenants` has the controls of single tenants, `fair_share` the passes of tenants (`claims.py`). Both are JSON or null.
-- `owner_tenant` submitted to the queue first.
CREATE TABLE queues (
    queue         TEXT PRIMARY KEY,
    has_jobs      INTEGER NOT NULL DEFAULT 0,
    owner_tenant  TEXT,
    paused        INTEGER NOT NULL DEFAULT 0,
    intake_paused INTEGER NOT NULL DEFAULT 0,
    concurrency   INTEGER,
    worker_concurrency INTEGER,
    intake_limit  INTEGER,
    backlog_alert INTEGER,
    tenants       TEXT,
    fair_share    TEXT
) WITHOUT ROWID;
CREATE INDEX queues_by_owner ON queues (owner_tenant) WHERE owner_tenant IS NOT NULL;

CREATE TABLE workers (
    worker  TEXT    NOT NULL,
    queue   TEXT    NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (queue, worker)
) WITHOUT ROWID;
-- Starts of workers with an id; the latest has it. `replaced_at`: when one that ran learned that a later one has its id.
CREATE TABLE worker_starts (
    queue       TEXT    NOT NULL,
    worker_id   TEXT    NOT NULL,
    generation  INTEGER NOT NULL,
    worker      TEXT    NOT NULL,
    seen_at     INTEGER NOT NULL,
    replaced_at INTEGER,
    PRIMARY KEY (queue, worker_id, generation, worker)
) WITHOUT ROWID;

-- Notices for other processes: 'cancelled' (job_id), 'due' (at_ms), 'controlled'.
CREATE TABLE notices (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    queue  TEXT    NOT NULL,
    kind   TEXT    NOT NULL,
    job_id TEXT    NOT NULL DEFAULT '',
    at_ms  INTEGER NOT NULL DEFAULT 0
);
