-- A file of the first release, with a job in every state: written by it, then dumped.
BEGIN TRANSACTION;
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
    status       TEXT    NOT NULL DEFAULT 'open',
    requested_by TEXT,
    confirmed_by TEXT,
    reason       TEXT,
    replayed_as  TEXT,
    PRIMARY KEY (tenant_id, dlq_id)
) WITHOUT ROWID;
INSERT INTO "dlq_items" VALUES('default','01a1dfd58eed72aab73a17e7e3d8f75d','failed','print','orders','','{"n":1}','TASK_ERROR','no luck','Traceback: line 1',0,'[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]',1704067202000,'open',NULL,NULL,NULL,NULL);
CREATE TABLE feed_entries (
    queue       TEXT    NOT NULL,
    position    INTEGER NOT NULL,
    first_event INTEGER NOT NULL,
    nonce       TEXT    NOT NULL,
    bytes       INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL,
    PRIMARY KEY (queue, position)
) WITHOUT ROWID;
INSERT INTO "feed_entries" VALUES('mails',37,37,'7d25f7edab48',207,207);
INSERT INTO "feed_entries" VALUES('orders',1,1,'116f2c12c8eb',207,207);
INSERT INTO "feed_entries" VALUES('orders',2,2,'b27e423954ee',200,407);
INSERT INTO "feed_entries" VALUES('orders',3,3,'11282a71467a',201,608);
INSERT INTO "feed_entries" VALUES('orders',4,4,'ba3c25d05605',207,815);
INSERT INTO "feed_entries" VALUES('orders',5,5,'047a0b41ed1d',200,1015);
INSERT INTO "feed_entries" VALUES('orders',6,6,'1a6e2960492e',207,1222);
INSERT INTO "feed_entries" VALUES('orders',7,7,'bc4d83d48916',207,1429);
INSERT INTO "feed_entries" VALUES('orders',8,8,'228e44d4b2bb',200,1629);
INSERT INTO "feed_entries" VALUES('orders',11,9,'04092ec47c9c',600,2229);
INSERT INTO "feed_entries" VALUES('orders',12,12,'9e4eb5d2dbc8',207,2436);
INSERT INTO "feed_entries" VALUES('orders',13,13,'65b52278db17',200,2636);
INSERT INTO "feed_entries" VALUES('orders',14,14,'0aa040a724f9',200,2836);
INSERT INTO "feed_entries" VALUES('orders',15,15,'99700a934c61',207,3043);
INSERT INTO "feed_entries" VALUES('orders',16,16,'9b973b2afa22',200,3243);
INSERT INTO "feed_entries" VALUES('orders',17,17,'7b4f429f7fdd',200,3443);
INSERT INTO "feed_entries" VALUES('orders',18,18,'04e586830909',207,3650);
INSERT INTO "feed_entries" VALUES('orders',19,19,'bae5b5915347',200,3850);
INSERT INTO "feed_entries" VALUES('orders',20,20,'eecdde87732f',200,4050);
INSERT INTO "feed_entries" VALUES('orders',21,21,'1ac6e1b00bc8',207,4257);
INSERT INTO "feed_entries" VALUES('orders',22,22,'f8f6aa270ea7',200,4457);
INSERT INTO "feed_entries" VALUES('orders',23,23,'2e06fc09e5b2',200,4657);
INSERT INTO "feed_entries" VALUES('orders',24,24,'24144b28d902',200,4857);
INSERT INTO "feed_entries" VALUES('orders',25,25,'73e43be536fb',207,5064);
INSERT INTO "feed_entries" VALUES('orders',26,26,'e0f6eccede89',200,5264);
INSERT INTO "feed_entries" VALUES('orders',27,27,'0045c5302ff7',200,5464);
INSERT INTO "feed_entries" VALUES('orders',28,28,'224edb8c9639',200,5664);
INSERT INTO "feed_entries" VALUES('orders',29,29,'812f3260f867',200,5864);
INSERT INTO "feed_entries" VALUES('orders',30,30,'05bd41edcd9b',207,6071);
INSERT INTO "feed_entries" VALUES('orders',31,31,'7b8b389ac8aa',200,6271);
INSERT INTO "feed_entries" VALUES('orders',32,32,'3ecaa7a146e7',207,6478);
INSERT INTO "feed_entries" VALUES('orders',33,33,'daf4990bb16e',200,6678);
INSERT INTO "feed_entries" VALUES('orders',36,34,'e140177cb19d',621,7299);
CREATE TABLE feed_readers (
    queue         TEXT PRIMARY KEY,
    position      INTEGER NOT NULL DEFAULT 0,
    registered_at INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "feed_readers" VALUES('mails',0,1704067202000);
CREATE TABLE job_events (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id   TEXT    NOT NULL,
    job_id      TEXT    NOT NULL,
    job         INTEGER NOT NULL,
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
INSERT INTO "job_events" VALUES(4,'acme','succeeded',2,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(5,'acme','succeeded',2,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(6,'acme','succeeded',2,3,'task.succeeded','running','succeeded',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(7,'default','failed',3,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(8,'default','failed',3,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(9,'default','failed',3,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1","dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',1704067202000);
INSERT INTO "job_events" VALUES(10,'default','failed',3,4,'task.dlq','dlq_pending','dlq_recorded',1,0,'w1','','{"dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',1704067202000);
INSERT INTO "job_events" VALUES(11,'default','failed',3,5,'task.failed','dlq_recorded','failed',1,0,'w1','','{"dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',1704067202000);
INSERT INTO "job_events" VALUES(12,'default','retrying',4,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(13,'default','retrying',4,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(14,'default','retrying',4,3,'task.retrying','running','retrying',1,1,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1","next_attempt_at_ms":1704067262000}',1704067202000);
INSERT INTO "job_events" VALUES(15,'default','suspended',5,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(16,'default','suspended',5,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(17,'default','suspended',5,3,'task.suspended','running','suspended',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(18,'default','dlq_pending',6,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(19,'default','dlq_pending',6,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(20,'default','dlq_pending',6,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(21,'default','dlq_recorded',7,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(22,'default','dlq_recorded',7,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(23,'default','dlq_recorded',7,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(24,'default','dlq_recorded',7,4,'task.dlq','dlq_pending','dlq_recorded',1,0,'','r','{"actor":"a","reason":"r","code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(25,'default','failed-by-ledger',8,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(26,'default','failed-by-ledger',8,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(27,'default','failed-by-ledger',8,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(28,'default','failed-by-ledger',8,4,'task.dlq','dlq_pending','dlq_recorded',1,0,'','r','{"actor":"a","reason":"r","code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(29,'default','failed-by-ledger',8,5,'task.failed','dlq_recorded','failed',1,0,'','r','{"actor":"a","reason":"r","code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "job_events" VALUES(30,'default','cancelled',9,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(31,'default','cancelled',9,2,'task.cancelled','queued','cancelled',0,0,'','no','{"actor":"ann","reason":"no","code":"CANCELLED","message":"no (by ann)","type":"","stack":""}',1704067202000);
INSERT INTO "job_events" VALUES(32,'default','running',10,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(33,'default','running',10,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(34,'default','waiting_approval',11,1,'approval.requested',NULL,'waiting_approval',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(35,'default','queued',12,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(36,'default','delayed',13,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "job_events" VALUES(37,'default','elsewhere',14,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
CREATE TABLE jobs (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id       TEXT    NOT NULL DEFAULT 'default',
    job_id          TEXT    NOT NULL,
    job_type        TEXT    NOT NULL,
    queue           TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    came_from       TEXT,
    priority        INTEGER NOT NULL CHECK (priority IN (0, 1, 2)),
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
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    line            INTEGER,
    due_at          INTEGER,
    lease_until     INTEGER,
    worker          TEXT,
    place           INTEGER NOT NULL DEFAULT 0,
    deliveries      INTEGER NOT NULL DEFAULT 0,
    claimed_at      INTEGER,
    token           TEXT,
    last_seq        INTEGER NOT NULL DEFAULT 0,
    meta            TEXT,
    context         TEXT    GENERATED ALWAYS AS (json_extract(meta, '$.context')) VIRTUAL,
    result          TEXT,
    payload         TEXT    NOT NULL,
    CHECK ((finished_at IS NOT NULL) = (state IN ('cancelled', 'failed', 'succeeded'))),
    CHECK ((line IS NOT NULL) + (due_at IS NOT NULL) + (lease_until IS NOT NULL) = (state IN ('queued', 'retrying', 'running'))),
    CHECK ((worker IS NOT NULL) = (state = 'running')),
    CHECK (state <> 'running' OR lease_until IS NOT NULL),
    CONSTRAINT legal_move CHECK (CASE came_from WHEN 'queued' THEN state IN ('cancelled', 'dlq_pending', 'running', 'suspended', 'waiting_approval') WHEN 'waiting_approval' THEN state IN ('cancelled', 'queued') WHEN 'running' THEN state IN ('cancelled', 'dlq_pending', 'queued', 'retrying', 'succeeded', 'suspended', 'waiting_approval') WHEN 'retrying' THEN state IN ('cancelled', 'dlq_pending', 'running', 'suspended') WHEN 'suspended' THEN state IN ('cancelled', 'queued') WHEN 'dlq_pending' THEN state IN ('dlq_recorded') WHEN 'dlq_recorded' THEN state IN ('failed') ELSE came_from IS NULL AND state IN ('queued', 'waiting_approval') END)
);
INSERT INTO "jobs" VALUES(2,'acme','succeeded','print','orders','succeeded','running',1,1,'','t1',NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,1,1,1704067202000,'2.1:1:w1',3,'{"max_retries":3,"context":{"user":"u1"},"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"succeeded"}]}','{"a":1}','{"n":1}');
INSERT INTO "jobs" VALUES(3,'default','failed','print','orders','failed','dlq_recorded',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,'01a1dfd58eed72aab73a17e7e3d8f75d',1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,1,1,1704067202000,'3.1:1:w1',5,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}],"dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(4,'default','retrying','print','orders','retrying','running',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,1704067262000,NULL,1704067202000,1704067202000,NULL,NULL,1704067262000,NULL,NULL,1,1,1704067202000,'4.1:1:w1',3,'{"retry_count":1,"max_retries":9,"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"retrying","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(5,'default','suspended','print','orders','suspended','running',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,1,1,1704067202000,'5.1:1:w1',3,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"suspended","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(6,'default','dlq_pending','print','orders','dlq_pending','running',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,1,1,1704067202000,'6.1:1:w1',3,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(7,'default','dlq_recorded','print','orders','dlq_recorded','dlq_pending',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,1,1,1704067202000,'7.1:1:w1',4,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(8,'default','failed-by-ledger','print','orders','failed','dlq_recorded',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,NULL,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,1,1,1704067202000,'8.1:1:w1',5,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(9,'default','cancelled','print','orders','cancelled','queued',1,0,'','','CANCELLED','no (by ann)','the job failed with CANCELLED',NULL,NULL,NULL,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,0,0,NULL,NULL,2,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(10,'default','running','print','orders','running','queued',1,1,'','',NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,1704067232000,'w1',1,1,1704067202000,NULL,2,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(11,'default','waiting_approval','print','orders','waiting_approval',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(12,'default','queued','print','orders','queued',NULL,1,0,'k1','',NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,1704067202000,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(13,'default','delayed','print','orders','queued',NULL,1,0,'','',NULL,NULL,NULL,1704067262000,NULL,NULL,1704067202000,1704067202000,NULL,NULL,1704067262000,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(14,'default','elsewhere','print','mails','queued',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,1704067202000,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
CREATE TABLE notices (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    queue  TEXT    NOT NULL,
    kind   TEXT    NOT NULL,
    job_id TEXT    NOT NULL DEFAULT '',
    at_ms  INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "notices" VALUES(1,'orders','due','',1704067262000);
INSERT INTO "notices" VALUES(2,'orders','due','',1704067262000);
INSERT INTO "notices" VALUES(3,'mails','controlled','',0);
CREATE TABLE queues (
    queue         TEXT PRIMARY KEY,
    used          INTEGER NOT NULL DEFAULT 0,
    paused        INTEGER NOT NULL DEFAULT 0,
    intake_paused INTEGER NOT NULL DEFAULT 0,
    concurrency   INTEGER
) WITHOUT ROWID;
INSERT INTO "queues" VALUES('mails',1,1,0,3);
INSERT INTO "queues" VALUES('orders',1,0,0,NULL);
CREATE TABLE submission_keys (
    tenant_id  TEXT    NOT NULL,
    queue      TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    job_id     TEXT    NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, queue, key)
) WITHOUT ROWID;
INSERT INTO "submission_keys" VALUES('default','orders','k1','queued',1704153602000);
CREATE TABLE workers (
    worker  TEXT    NOT NULL,
    queue   TEXT    NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (queue, worker)
) WITHOUT ROWID;
INSERT INTO "workers" VALUES('w1','orders',1704067200000);
CREATE UNIQUE INDEX jobs_by_job_id ON jobs (queue, job_id);
CREATE INDEX jobs_line ON jobs (queue, priority, line, state) WHERE line IS NOT NULL;
CREATE INDEX jobs_due ON jobs (queue, due_at, state) WHERE due_at IS NOT NULL;
CREATE INDEX jobs_leased ON jobs (queue, lease_until, state) WHERE lease_until IS NOT NULL;
CREATE INDEX jobs_aside ON jobs (queue, state) WHERE state IN ('dlq_pending', 'dlq_recorded', 'suspended', 'waiting_approval');
CREATE INDEX jobs_finished ON jobs (queue, finished_at, state) WHERE finished_at IS NOT NULL;
CREATE UNIQUE INDEX job_events_by_job ON job_events (job, seq);
CREATE INDEX submission_keys_by_expiry ON submission_keys (queue, expires_at);
CREATE INDEX dlq_items_by_job ON dlq_items (queue, job_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',14);
INSERT INTO "sqlite_sequence" VALUES('job_events',37);
INSERT INTO "sqlite_sequence" VALUES('notices',3);
COMMIT;
PRAGMA user_version = 1;
PRAGMA application_id = 1752132708;
