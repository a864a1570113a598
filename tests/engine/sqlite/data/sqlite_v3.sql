-- A file of the third release: the second one's, migrated by it and used on.
BEGIN TRANSACTION;
CREATE TABLE alerts (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	"key" TEXT NOT NULL, 
	raised_at BIGINT NOT NULL, 
	CONSTRAINT alerts_pk PRIMARY KEY (tenant_id, "key")
);
CREATE TABLE anomalies (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	queue TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	event TEXT NOT NULL, 
	at BIGINT NOT NULL, 
	CONSTRAINT anomalies_pk PRIMARY KEY (tenant_id, id)
);
CREATE TABLE approval_votes (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	approval_id TEXT NOT NULL, 
	person TEXT NOT NULL, 
	approve SMALLINT NOT NULL, 
	reason TEXT DEFAULT '' NOT NULL, 
	at BIGINT NOT NULL, 
	CONSTRAINT approval_votes_pk PRIMARY KEY (tenant_id, approval_id, person)
);
INSERT INTO "approval_votes" VALUES('default','a1','ann@example.org',1,'fine',1700000000000);
CREATE TABLE approvals (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	approval_id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	queue TEXT NOT NULL, 
	job_type TEXT NOT NULL, 
	status TEXT DEFAULT 'requested' NOT NULL, 
	name TEXT DEFAULT '' NOT NULL, 
	payload_hash TEXT NOT NULL, 
	policies TEXT DEFAULT '[]' NOT NULL, 
	reason TEXT DEFAULT '' NOT NULL, 
	details TEXT, 
	quorum SMALLINT DEFAULT '1' NOT NULL, 
	deadline BIGINT, 
	requested_by TEXT NOT NULL, 
	requested_at BIGINT NOT NULL, 
	decided_by TEXT, 
	decided_at BIGINT, 
	decision_reason TEXT, 
	acked_at BIGINT, 
	told TEXT, 
	CONSTRAINT approvals_pk PRIMARY KEY (tenant_id, approval_id), 
	CONSTRAINT approvals_known_status CHECK (status IN ('requested', 'approved', 'rejected', 'expired', 'withdrawn')), 
	CONSTRAINT approvals_decision CHECK ((decided_at IS NULL) = (status = 'requested')), 
	CONSTRAINT approvals_quorum CHECK (quorum > 0)
);
INSERT INTO "approvals" VALUES('default','a1','held','orders','print','requested','','ab','["large-sums"]','',NULL,1,NULL,'ada',1704067210000,NULL,NULL,NULL,NULL,'requested');
INSERT INTO "approvals" VALUES('default','approval-1','asked','approvals','print','requested','','abababababababababababababababababababababababababababababababab','["large-sums"]','more than 100 €','{"sum":120}',2,NULL,'ada',1704067205000,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "approvals" VALUES('default','approval-2','consented','approvals','print','withdrawn','send it?','abababababababababababababababababababababababababababababababab','["large-sums"]','more than 100 €','{"sum":120}',2,NULL,'ada',1704067205000,'ann',1704067205000,'ok',1704067205000,NULL);
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
INSERT INTO "dlq_items" VALUES('default','01a1dfd58eed72aab73a17e7e3d8f75d','failed','print','orders','','{"n":1}','TASK_ERROR','no luck','Traceback: line 1',0,'[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]',1704067202000,'open',NULL,NULL,NULL,NULL,0,NULL,0,'8e47928be1238b25',1704067202000);
CREATE TABLE events (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
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
INSERT INTO "events" VALUES(4,2,1,'task.created',NULL,'queued',0,0,'','','{"meta":"{\"max_retries\":3,\"context\":{\"user\":\"u1\"}}"}',1704067202000);
INSERT INTO "events" VALUES(5,2,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(6,2,3,'task.succeeded','running','succeeded',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(7,3,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(8,3,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(9,3,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1","dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',1704067202000);
INSERT INTO "events" VALUES(10,3,4,'task.dlq','dlq_pending','dlq_recorded',1,0,'w1','','{"dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',1704067202000);
INSERT INTO "events" VALUES(11,3,5,'task.failed','dlq_recorded','failed',1,0,'w1','','{"dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',1704067202000);
INSERT INTO "events" VALUES(12,4,1,'task.created',NULL,'queued',0,0,'','','{"meta":"{\"max_retries\":9}"}',1704067202000);
INSERT INTO "events" VALUES(13,4,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(14,4,3,'task.retrying','running','retrying',1,1,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1","next_attempt_at_ms":1704067262000}',1704067202000);
INSERT INTO "events" VALUES(15,5,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(16,5,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(17,5,3,'task.suspended','running','suspended',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(18,6,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(19,6,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(20,6,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(21,7,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(22,7,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(23,7,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(24,7,4,'task.dlq','dlq_pending','dlq_recorded',1,0,'','r','{"actor":"a","reason":"r","code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(25,8,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(26,8,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(27,8,3,'task.dlq_pending','running','dlq_pending',1,0,'w1','no luck','{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(28,8,4,'task.dlq','dlq_pending','dlq_recorded',1,0,'','r','{"actor":"a","reason":"r","code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(29,8,5,'task.failed','dlq_recorded','failed',1,0,'','r','{"actor":"a","reason":"r","code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}',1704067202000);
INSERT INTO "events" VALUES(30,9,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(31,9,2,'task.cancelled','queued','cancelled',0,0,'','no','{"actor":"ann","reason":"no","code":"CANCELLED","message":"no (by ann)","type":"","stack":""}',1704067202000);
INSERT INTO "events" VALUES(32,10,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(33,10,2,'task.claimed','queued','running',1,0,'w1','',NULL,1704067202000);
INSERT INTO "events" VALUES(34,11,1,'approval.requested',NULL,'waiting_approval',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(35,12,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(36,13,1,'task.created',NULL,'queued',0,0,'','','{"run_at_ms":1704067262000}',1704067202000);
INSERT INTO "events" VALUES(37,14,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067202000);
INSERT INTO "events" VALUES(38,15,1,'task.created',NULL,'queued',0,0,'','','{"run_at_ms":1704070810000,"meta":"{\"max_retries\":9,\"context\":{\"user\":\"u2\"}}"}',1704067210000);
INSERT INTO "events" VALUES(39,16,1,'approval.requested',NULL,'waiting_approval',0,0,'','','{"run_at_ms":0,"meta":"{\"max_retries\":4}"}',1704067210000);
INSERT INTO "events" VALUES(40,17,1,'approval.requested',NULL,'waiting_approval',0,0,'','','{"run_at_ms":0,"meta":"{\"ask\":{\"approval_id\":\"approval-1\",\"payload_hash\":\"abababababababababababababababababababababababababababababababab\",\"reason\":\"more than 100 €\",\"policies\":[\"large-sums\"],\"quorum\":2,\"requested_by\":\"ada\",\"details\":{\"sum\":120}}}"}',1704067205000);
INSERT INTO "events" VALUES(41,18,1,'approval.requested',NULL,'waiting_approval',0,0,'','','{"run_at_ms":0,"meta":"{\"ask\":{\"approval_id\":\"approval-1\",\"payload_hash\":\"abababababababababababababababababababababababababababababababab\",\"reason\":\"more than 100 €\",\"policies\":[\"large-sums\"],\"quorum\":2,\"requested_by\":\"ada\",\"details\":{\"sum\":120}}}"}',1704067205000);
INSERT INTO "events" VALUES(42,19,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067205000);
INSERT INTO "events" VALUES(43,20,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067205000);
INSERT INTO "events" VALUES(44,18,2,'approval.approved','waiting_approval','queued',0,0,'','ok','{"actor":"ann","reason":"ok","consent":{"approval_id":"approval-1","by":["bob","cy"],"at_ms":1700000000000,"reason":"fine"}}',1704067205000);
INSERT INTO "events" VALUES(45,18,3,'task.claimed','queued','running',1,0,'w9','',NULL,1704067205000);
INSERT INTO "events" VALUES(46,19,2,'task.claimed','queued','running',1,0,'w9','',NULL,1704067205000);
INSERT INTO "events" VALUES(47,20,2,'task.claimed','queued','running',1,0,'w9','',NULL,1704067205000);
INSERT INTO "events" VALUES(48,19,3,'approval.requested','running','waiting_approval',1,0,'w9','send it?','{"message":"send it?","ask":{"approval_id":"approval-2","payload_hash":"abababababababababababababababababababababababababababababababab","name":"send it?","reason":"more than 100 €","policies":["large-sums"],"quorum":2,"requested_by":"ada","details":{"sum":120}}}',1704067205000);
INSERT INTO "events" VALUES(49,20,3,'task.succeeded','running','succeeded',1,0,'w9','',NULL,1704067205000);
INSERT INTO "events" VALUES(50,19,4,'approval.approved','waiting_approval','queued',1,0,'','ok','{"actor":"ann","reason":"ok","consent":{"approval_id":"approval-2","by":["bob"],"at_ms":1700000000000}}',1704067205000);
INSERT INTO "events" VALUES(51,21,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067205000);
INSERT INTO "events" VALUES(52,22,1,'task.created',NULL,'queued',0,0,'','',NULL,1704067205000);
INSERT INTO "events" VALUES(53,21,2,'task.claimed','queued','running',1,0,'w8','',NULL,1704067205000);
CREATE TABLE feed_entries (
    queue       TEXT    NOT NULL,
    position    INTEGER NOT NULL,
    first_event INTEGER NOT NULL,
    nonce       TEXT    NOT NULL,
    bytes       INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL,
    hurry       INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, position)
) WITHOUT ROWID;
INSERT INTO "feed_entries" VALUES('approvals',43,40,'8ee07fccc893',828,828,1);
INSERT INTO "feed_entries" VALUES('approvals',44,44,'995157d83ed2',200,1028,0);
INSERT INTO "feed_entries" VALUES('approvals',47,45,'38262073aa52',600,1628,0);
INSERT INTO "feed_entries" VALUES('approvals',48,48,'363005ba40ef',200,1828,0);
INSERT INTO "feed_entries" VALUES('approvals',49,49,'56f433b651cd',201,2029,0);
INSERT INTO "feed_entries" VALUES('approvals',50,50,'c13528ce0db6',200,2229,0);
INSERT INTO "feed_entries" VALUES('approvals',52,51,'aa6e456f9a62',414,2643,0);
INSERT INTO "feed_entries" VALUES('approvals',53,53,'ea0f7e8f500d',200,2843,0);
INSERT INTO "feed_entries" VALUES('mails',37,37,'7d25f7edab48',207,207,0);
INSERT INTO "feed_entries" VALUES('orders',1,1,'116f2c12c8eb',207,207,0);
INSERT INTO "feed_entries" VALUES('orders',2,2,'b27e423954ee',200,407,0);
INSERT INTO "feed_entries" VALUES('orders',3,3,'11282a71467a',201,608,0);
INSERT INTO "feed_entries" VALUES('orders',4,4,'ba3c25d05605',207,815,0);
INSERT INTO "feed_entries" VALUES('orders',5,5,'047a0b41ed1d',200,1015,0);
INSERT INTO "feed_entries" VALUES('orders',6,6,'1a6e2960492e',207,1222,0);
INSERT INTO "feed_entries" VALUES('orders',7,7,'bc4d83d48916',207,1429,0);
INSERT INTO "feed_entries" VALUES('orders',8,8,'228e44d4b2bb',200,1629,0);
INSERT INTO "feed_entries" VALUES('orders',11,9,'04092ec47c9c',600,2229,0);
INSERT INTO "feed_entries" VALUES('orders',12,12,'9e4eb5d2dbc8',207,2436,0);
INSERT INTO "feed_entries" VALUES('orders',13,13,'65b52278db17',200,2636,0);
INSERT INTO "feed_entries" VALUES('orders',14,14,'0aa040a724f9',200,2836,0);
INSERT INTO "feed_entries" VALUES('orders',15,15,'99700a934c61',207,3043,0);
INSERT INTO "feed_entries" VALUES('orders',16,16,'9b973b2afa22',200,3243,0);
INSERT INTO "feed_entries" VALUES('orders',17,17,'7b4f429f7fdd',200,3443,0);
INSERT INTO "feed_entries" VALUES('orders',18,18,'04e586830909',207,3650,0);
INSERT INTO "feed_entries" VALUES('orders',19,19,'bae5b5915347',200,3850,0);
INSERT INTO "feed_entries" VALUES('orders',20,20,'eecdde87732f',200,4050,0);
INSERT INTO "feed_entries" VALUES('orders',21,21,'1ac6e1b00bc8',207,4257,0);
INSERT INTO "feed_entries" VALUES('orders',22,22,'f8f6aa270ea7',200,4457,0);
INSERT INTO "feed_entries" VALUES('orders',23,23,'2e06fc09e5b2',200,4657,0);
INSERT INTO "feed_entries" VALUES('orders',24,24,'24144b28d902',200,4857,0);
INSERT INTO "feed_entries" VALUES('orders',25,25,'73e43be536fb',207,5064,0);
INSERT INTO "feed_entries" VALUES('orders',26,26,'e0f6eccede89',200,5264,0);
INSERT INTO "feed_entries" VALUES('orders',27,27,'0045c5302ff7',200,5464,0);
INSERT INTO "feed_entries" VALUES('orders',28,28,'224edb8c9639',200,5664,0);
INSERT INTO "feed_entries" VALUES('orders',29,29,'812f3260f867',200,5864,0);
INSERT INTO "feed_entries" VALUES('orders',30,30,'05bd41edcd9b',207,6071,0);
INSERT INTO "feed_entries" VALUES('orders',31,31,'7b8b389ac8aa',200,6271,0);
INSERT INTO "feed_entries" VALUES('orders',32,32,'3ecaa7a146e7',207,6478,0);
INSERT INTO "feed_entries" VALUES('orders',33,33,'daf4990bb16e',200,6678,0);
INSERT INTO "feed_entries" VALUES('orders',36,34,'e140177cb19d',621,7299,0);
INSERT INTO "feed_entries" VALUES('orders',38,38,'85b3f940e08e',207,7506,0);
INSERT INTO "feed_entries" VALUES('orders',39,39,'2294f64b5de7',207,7713,0);
CREATE TABLE feed_positions (
	feed TEXT NOT NULL, 
	position TEXT NOT NULL, 
	nonce TEXT NOT NULL, 
	projector TEXT, 
	until BIGINT, 
	updated_at BIGINT NOT NULL, 
	CONSTRAINT feed_positions_pk PRIMARY KEY (feed)
);
INSERT INTO "feed_positions" VALUES('orders','12','n1','projector-1',1700000000000,1700000000000);
CREATE TABLE feed_readers (
    queue         TEXT PRIMARY KEY,
    position      INTEGER NOT NULL DEFAULT 0,
    registered_at INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "feed_readers" VALUES('mails',0,1704067202000);
CREATE TABLE idempotency_keys (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	"key" TEXT NOT NULL, 
	state TEXT NOT NULL, 
	value TEXT, 
	created_at BIGINT NOT NULL, 
	expires_at BIGINT, 
	function TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	token TEXT NOT NULL, 
	queue TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	worker TEXT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	reason TEXT, 
	CONSTRAINT idempotency_keys_pk PRIMARY KEY (tenant_id, "key"), 
	CONSTRAINT idempotency_keys_known_state CHECK (state IN ('reserved', 'done', 'in_doubt')), 
	CONSTRAINT idempotency_keys_result CHECK ((state = 'done') = (value IS NOT NULL))
);
CREATE TABLE job_steps (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	job_id TEXT NOT NULL, 
	queue TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	result TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	at BIGINT NOT NULL, 
	CONSTRAINT job_steps_pk PRIMARY KEY (tenant_id, job_id, queue, position), 
	CONSTRAINT job_steps_position CHECK (position > 0)
);
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
    webhook         TEXT    GENERATED ALWAYS AS (json_extract(meta, '$.webhook')) VIRTUAL,
    told_at         INTEGER,
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

    CONSTRAINT dead_letter CHECK (dlq_id IS NOT NULL OR state <> 'dlq_recorded' AND state <> 'failed'),
    CONSTRAINT legal_move CHECK (CASE came_from WHEN 'queued' THEN state IN ('cancelled', 'dlq_pending', 'running', 'suspended', 'waiting_approval') WHEN 'waiting_approval' THEN state IN ('cancelled', 'queued') WHEN 'running' THEN state IN ('cancelled', 'dlq_pending', 'queued', 'retrying', 'succeeded', 'suspended', 'waiting_approval') WHEN 'retrying' THEN state IN ('cancelled', 'dlq_pending', 'running', 'suspended') WHEN 'suspended' THEN state IN ('cancelled', 'queued') WHEN 'dlq_pending' THEN state IN ('dlq_recorded') WHEN 'dlq_recorded' THEN state IN ('failed') ELSE came_from IS NULL AND state IN ('queued', 'waiting_approval') END)
);
INSERT INTO "jobs" VALUES(2,'acme','succeeded','print','orders','succeeded','running',1,1,'','t1',NULL,NULL,NULL,NULL,NULL,NULL,1700000000000,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,1,1,1704067202000,'2.1:1:w1',3,'{"max_retries":3,"context":{"user":"u1"},"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"succeeded"}]}','{"a":1}','{"n":1}');
INSERT INTO "jobs" VALUES(3,'default','failed','print','orders','failed','dlq_recorded',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,'01a1dfd58eed72aab73a17e7e3d8f75d',NULL,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,1,1,1704067202000,'3.1:1:w1',5,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}],"dlq_id":"01a1dfd58eed72aab73a17e7e3d8f75d"}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(4,'default','retrying','print','orders','retrying','running',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,1704067262000,NULL,NULL,1704067202000,1704067202000,NULL,NULL,1704067262000,NULL,NULL,1,1,1704067202000,'4.1:1:w1',3,'{"retry_count":1,"max_retries":9,"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"retrying","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(5,'default','suspended','print','orders','suspended','running',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,1,1,1704067202000,'5.1:1:w1',3,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"suspended","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}]}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(6,'default','dlq_pending','print','orders','dlq_pending','running',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,'c6b712c3f1c7aa28d0d1d85c5467ced9',NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,1,1,1704067202000,'6.1:1:w1',3,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}],"dlq_id":"c6b712c3f1c7aa28d0d1d85c5467ced9"}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(7,'default','dlq_recorded','print','orders','dlq_recorded','dlq_pending',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,'f217274a8e5c02eacc34f74d92079b12',NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,1,1,1704067202000,'7.1:1:w1',4,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}],"dlq_id":"f217274a8e5c02eacc34f74d92079b12"}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(8,'default','failed-by-ledger','print','orders','failed','dlq_recorded',1,1,'','','TASK_ERROR','LuckError: no luck','the job failed with TASK_ERROR',NULL,NULL,'3f9af1e57194ca6f56e9e2aae49a9f79',NULL,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,1,1,1704067202000,'8.1:1:w1',5,'{"history":[{"number":1,"worker":"w1","started_at_ms":1704067202000,"finished_at_ms":1704067202000,"outcome":"dlq_pending","failure":{"code":"TASK_ERROR","message":"no luck","type":"LuckError","stack":"Traceback: line 1"}}],"dlq_id":"3f9af1e57194ca6f56e9e2aae49a9f79"}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(9,'default','cancelled','print','orders','cancelled','queued',1,0,'','','CANCELLED','no (by ann)','the job failed with CANCELLED',NULL,NULL,NULL,NULL,1704067202000,1704067202000,1704067202000,NULL,NULL,NULL,NULL,0,0,NULL,NULL,2,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(10,'default','running','print','orders','running','queued',1,1,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,1704067232000,'w1',1,1,1704067202000,NULL,2,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(11,'default','waiting_approval','print','orders','waiting_approval',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(12,'default','queued','print','orders','queued',NULL,1,0,'k1','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,1704067202000,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(13,'default','delayed','print','orders','queued',NULL,1,0,'','',NULL,NULL,NULL,1704067262000,NULL,NULL,NULL,1704067202000,1704067202000,NULL,NULL,1704067262000,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(14,'default','elsewhere','print','mails','queued',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067202000,1704067202000,NULL,1704067202000,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(15,'acme','second','print','orders','queued',NULL,1,0,'','',NULL,NULL,NULL,1704070810000,NULL,NULL,NULL,1704067210000,1704067210000,NULL,NULL,1704070810000,NULL,NULL,0,0,NULL,NULL,1,'{"max_retries":9,"context":{"user":"u2"}}',NULL,'{"n":2}');
INSERT INTO "jobs" VALUES(16,'default','held','print','orders','waiting_approval',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067210000,1704067210000,NULL,NULL,NULL,NULL,NULL,0,0,NULL,NULL,1,'{"max_retries":4}',NULL,'{"n":3}');
INSERT INTO "jobs" VALUES(17,'default','asked','print','approvals','waiting_approval',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067205000,1704067205000,NULL,NULL,NULL,NULL,NULL,0,0,NULL,NULL,1,'{"ask":{"approval_id":"approval-1","payload_hash":"abababababababababababababababababababababababababababababababab","reason":"more than 100 €","policies":["large-sums"],"quorum":2,"requested_by":"ada","details":{"sum":120}}}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(18,'default','cleared','print','approvals','running','queued',1,1,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067205000,1704067205000,NULL,NULL,NULL,1704067235000,'w9',1,1,1704067205000,NULL,3,'{"cleared":"abababababababababababababababababababababababababababababababab"}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(19,'default','consented','print','approvals','queued','waiting_approval',1,1,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067205000,1704067205000,NULL,1704067205000,NULL,NULL,NULL,1,1,1704067205000,'19.1:1:w9',4,'{"history":[{"number":1,"worker":"w9","started_at_ms":1704067205000,"finished_at_ms":1704067205000,"outcome":"waiting_approval"}],"consents":{"send it?":{"approval_id":"approval-2","by":["bob"],"at_ms":1700000000000}}}',NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(20,'default','durable','print','approvals','succeeded','running',1,1,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067205000,1704067205000,1704067205000,NULL,NULL,NULL,NULL,1,1,1704067205000,'20.1:1:w9',3,'{"history":[{"number":1,"worker":"w9","started_at_ms":1704067205000,"finished_at_ms":1704067205000,"outcome":"succeeded"}]}','1','{"n":1}');
INSERT INTO "jobs" VALUES(21,'acme','fair-1','print','approvals','running','queued',1,1,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067205000,1704067205000,NULL,NULL,NULL,1704067235000,'w8',1,1,1704067205000,NULL,2,NULL,NULL,'{"n":1}');
INSERT INTO "jobs" VALUES(22,'beta','fair-2','print','approvals','queued',NULL,1,0,'','',NULL,NULL,NULL,NULL,NULL,NULL,NULL,1704067205000,1704067205000,NULL,1704067205000,NULL,NULL,NULL,0,0,NULL,NULL,1,NULL,NULL,'{"n":1}');
CREATE TABLE ledger_owner (
	id SMALLINT NOT NULL, 
	namespace TEXT NOT NULL, 
	engine TEXT DEFAULT '' NOT NULL, 
	since BIGINT NOT NULL, 
	CONSTRAINT ledger_owner_pk PRIMARY KEY (id), 
	CONSTRAINT ledger_owner_one CHECK (id = 1)
);
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
INSERT INTO "notices" VALUES(4,'approvals','controlled','',0);
CREATE TABLE operator_events (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	id TEXT NOT NULL, 
	type TEXT NOT NULL, 
	actor TEXT NOT NULL, 
	target TEXT NOT NULL, 
	target_id TEXT NOT NULL, 
	queue TEXT DEFAULT '' NOT NULL, 
	reason TEXT DEFAULT '' NOT NULL, 
	"before" TEXT, 
	"after" TEXT, 
	at BIGINT NOT NULL, 
	told_at BIGINT, 
	CONSTRAINT operator_events_pk PRIMARY KEY (tenant_id, id)
);
INSERT INTO "operator_events" VALUES('default','op1','alert.backlog','holdfast','queue','orders','orders','',NULL,NULL,1700000000000,1700000000001);
CREATE TABLE outbox_events (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	id TEXT NOT NULL, 
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	destination TEXT NOT NULL, 
	topic TEXT NOT NULL, 
	"key" TEXT, 
	lane SMALLINT NOT NULL, 
	payload TEXT NOT NULL, 
	headers TEXT, 
	status TEXT DEFAULT 'NEW' NOT NULL, 
	attempt_count INTEGER DEFAULT '0' NOT NULL, 
	next_retry_at BIGINT, 
	last_error TEXT, 
	created_at BIGINT NOT NULL, 
	sent_at BIGINT, 
	CONSTRAINT outbox_events_by_id UNIQUE (tenant_id, id), 
	CONSTRAINT outbox_events_known_status CHECK (status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')), 
	CONSTRAINT outbox_events_known_lane CHECK (lane BETWEEN 0 AND 63), 
	CONSTRAINT outbox_events_sent CHECK ((sent_at IS NOT NULL) = (status = 'SENT')), 
	CONSTRAINT outbox_events_next_retry CHECK ((next_retry_at IS NOT NULL) = (status = 'RETRYING'))
);
CREATE TABLE outbox_lanes (
	lane SMALLINT NOT NULL, 
	relay TEXT NOT NULL, 
	until BIGINT NOT NULL, 
	CONSTRAINT outbox_lanes_pk PRIMARY KEY (lane)
);
INSERT INTO "outbox_lanes" VALUES(3,'relay-1',1700000000000);
CREATE TABLE queue_executions (
	tenant_id TEXT DEFAULT 'default' NOT NULL, 
	id TEXT NOT NULL, 
	message_id TEXT NOT NULL, 
	queue_name TEXT NOT NULL, 
	event_name TEXT, 
	status TEXT NOT NULL, 
	started_at BIGINT NOT NULL, 
	completed_at BIGINT, 
	duration_ms INTEGER, 
	agent_run_id TEXT, 
	error_message TEXT, 
	retry_count INTEGER DEFAULT '0' NOT NULL, 
	trace_id TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT queue_executions_pk PRIMARY KEY (tenant_id, id)
);
CREATE TABLE queues (
    queue         TEXT PRIMARY KEY,
    used          INTEGER NOT NULL DEFAULT 0,
    paused        INTEGER NOT NULL DEFAULT 0,
    intake_paused INTEGER NOT NULL DEFAULT 0,
    concurrency   INTEGER,
    intake_limit  INTEGER,
    backlog_alert INTEGER,
    tenants       TEXT,
    turns         TEXT
) WITHOUT ROWID;
INSERT INTO "queues" VALUES('approvals',1,0,0,NULL,NULL,NULL,'{"acme":{"weight":2,"concurrency":1}}','{"ahead":{"acme":524288}}');
INSERT INTO "queues" VALUES('mails',1,1,0,3,NULL,NULL,NULL,NULL);
INSERT INTO "queues" VALUES('orders',1,0,0,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE submission_keys (
    tenant_id  TEXT    NOT NULL,
    queue      TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    job_id     TEXT    NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, queue, key)
) WITHOUT ROWID;
INSERT INTO "submission_keys" VALUES('default','orders','k1','queued',1704153602000);
CREATE TABLE tokens (
	token_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	role TEXT NOT NULL, 
	tenants TEXT NOT NULL, 
	secret_hash TEXT NOT NULL, 
	created_by TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	expires_at BIGINT, 
	revoked_at BIGINT, 
	CONSTRAINT tokens_pk PRIMARY KEY (token_id), 
	CONSTRAINT tokens_known_role CHECK (role IN ('viewer', 'operator', 'approver', 'admin'))
);
CREATE TABLE trigger_pauses (
	name TEXT NOT NULL, 
	paused_by TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	paused_at BIGINT NOT NULL, 
	CONSTRAINT trigger_pauses_pk PRIMARY KEY (name)
);
CREATE TABLE trigger_presences (
	name TEXT NOT NULL, 
	process TEXT NOT NULL, 
	queue_name TEXT NOT NULL, 
	adapter TEXT NOT NULL, 
	health TEXT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	CONSTRAINT trigger_presences_pk PRIMARY KEY (name, process)
);
CREATE TABLE workers (
    worker  TEXT    NOT NULL,
    queue   TEXT    NOT NULL,
    seen_at INTEGER NOT NULL,
    PRIMARY KEY (queue, worker)
) WITHOUT ROWID;
INSERT INTO "workers" VALUES('w8','approvals',1704067205000);
INSERT INTO "workers" VALUES('w9','approvals',1704067205000);
INSERT INTO "workers" VALUES('w1','orders',1704067200000);
CREATE UNIQUE INDEX jobs_by_job_id ON jobs (job_id, queue);
CREATE INDEX jobs_line ON jobs (queue, priority, tenant_id, line, state) WHERE line IS NOT NULL;
CREATE INDEX jobs_due ON jobs (queue, due_at, state) WHERE due_at IS NOT NULL;
CREATE INDEX jobs_leased ON jobs (queue, lease_until, state, tenant_id) WHERE lease_until IS NOT NULL;
CREATE INDEX jobs_aside ON jobs (queue, state) WHERE state IN ('dlq_pending', 'dlq_recorded', 'suspended', 'waiting_approval');
CREATE INDEX jobs_finished ON jobs (queue, finished_at, state) WHERE finished_at IS NOT NULL;
CREATE INDEX jobs_by_key ON jobs (tenant_id, idempotency_key) WHERE idempotency_key <> job_id AND idempotency_key <> '';
CREATE INDEX jobs_by_state ON jobs (tenant_id, state, created_at, job_id) WHERE state = 'cancelled' OR state = 'dlq_pending' OR state = 'dlq_recorded' OR state = 'failed' OR state = 'retrying' OR state = 'suspended' OR state = 'waiting_approval';
CREATE UNIQUE INDEX events_by_job ON events (job, seq);
CREATE VIEW job_events AS
SELECT event.id, jobs.tenant_id, jobs.job_id, jobs.queue, event.job, event.seq, event.type, event.from_state,
       event.to_state, event.attempt, event.retry_count, event.worker, event.message, CASE
       WHEN event.from_state IS NULL AND event.to_state IS NOT NULL THEN json_patch(
           json_object(
               'task', jobs.job_type, 'payload', jobs.payload, 'tenant_id', jobs.tenant_id,
               'idempotency_key', iif(jobs.idempotency_key = '', jobs.job_id, jobs.idempotency_key),
               'trace_id', jobs.trace_id, 'priority', jobs.priority, 'context', json(jobs.context), 'run_at_ms', 0),
           coalesce(event.data, '{}'))
       WHEN event.to_state = 'succeeded' THEN json_object('result', jobs.result)
       ELSE event.data END AS data, event.at
  FROM events AS event JOIN jobs ON jobs.id = event.job;
CREATE INDEX submission_keys_by_expiry ON submission_keys (queue, expires_at);
CREATE INDEX dlq_items_by_queue ON dlq_items (queue, failed_at);
CREATE INDEX dlq_items_by_job ON dlq_items (tenant_id, job_id, queue);
CREATE INDEX dlq_items_by_time ON dlq_items (tenant_id, failed_at, dlq_id);
CREATE INDEX dlq_items_by_fingerprint ON dlq_items (tenant_id, fingerprint, failed_at);
CREATE INDEX dlq_items_replaying ON dlq_items (tenant_id, dlq_id) WHERE replay_pending = 1;
CREATE INDEX anomalies_by_job ON anomalies (tenant_id, job_id, queue);
CREATE INDEX anomalies_by_time ON anomalies (tenant_id, at);
CREATE INDEX approvals_by_deadline ON approvals (tenant_id, deadline) WHERE status = 'requested' AND deadline IS NOT NULL;
CREATE INDEX approvals_by_job ON approvals (tenant_id, job_id, queue);
CREATE INDEX approvals_by_time ON approvals (tenant_id, status, requested_at);
CREATE INDEX approvals_undelivered ON approvals (tenant_id, decided_at) WHERE acked_at IS NULL AND decided_at IS NOT NULL;
CREATE INDEX approvals_untold ON approvals (tenant_id, requested_at) WHERE told IS NULL OR told <> status;
CREATE INDEX idempotency_keys_by_expiry ON idempotency_keys (tenant_id, expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX idempotency_keys_by_job ON idempotency_keys (tenant_id, job_id);
CREATE INDEX idempotency_keys_in_doubt ON idempotency_keys (tenant_id, updated_at) WHERE state <> 'done';
CREATE INDEX jobs_by_time ON jobs (tenant_id, created_at);
CREATE INDEX jobs_by_trace ON jobs (tenant_id, trace_id) WHERE trace_id <> '';
CREATE INDEX jobs_by_type ON jobs (tenant_id, job_type, created_at);
CREATE INDEX jobs_untold ON jobs (tenant_id, finished_at) WHERE webhook IS NOT NULL AND told_at IS NULL AND finished_at IS NOT NULL;
CREATE INDEX jobs_with_error ON jobs (tenant_id, created_at, job_id) WHERE last_error IS NOT NULL;
CREATE INDEX operator_events_by_time ON operator_events (tenant_id, at, id);
CREATE INDEX operator_events_untold ON operator_events (tenant_id, at) WHERE told_at IS NULL AND type LIKE 'alert.%';
CREATE INDEX outbox_events_by_key ON outbox_events (lane, destination, topic, coalesce(key, ''), position) WHERE status = 'NEW';
CREATE INDEX outbox_events_by_sent ON outbox_events (sent_at) WHERE status = 'SENT';
CREATE INDEX outbox_events_by_status ON outbox_events (tenant_id, status, position);
CREATE INDEX outbox_events_in_the_way ON outbox_events (destination, topic, "key", status, position) WHERE status IN ('RETRYING', 'DEAD');
CREATE INDEX outbox_events_retrying ON outbox_events (lane, next_retry_at) WHERE status = 'RETRYING';
CREATE INDEX outbox_events_waiting ON outbox_events (lane, destination, position) WHERE status = 'NEW';
CREATE INDEX queue_executions_by_message ON queue_executions (tenant_id, message_id);
CREATE INDEX queue_executions_by_queue ON queue_executions (tenant_id, queue_name, started_at);
CREATE INDEX queue_executions_by_time ON queue_executions (tenant_id, started_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('outbox_events',0);
INSERT INTO "sqlite_sequence" VALUES('jobs',22);
INSERT INTO "sqlite_sequence" VALUES('events',53);
INSERT INTO "sqlite_sequence" VALUES('notices',4);
COMMIT;
PRAGMA application_id = 1752132708;
PRAGMA user_version = 3;
