"""Speed of holdfast, compared with a bare Redis loop, other task systems and FastStream: `python -m benchmarks`.

options   the command line
machine   the machine: held awake, calibrated, described
stores    Redis and SQLite, fresh for every probe; `postgres` likewise, `audit` Redis with its ledger
brokers   Kafka and RabbitMQ
sides     code of the contestants; each runs in separate processes
peers     the same for other task systems, in separate environments
children  the parent's end of those processes
stages    what is measured: submit, drain, latency, backlog; audited, projector, lag, durable, effects, history;
          http; kafka, rabbitmq, outbox, delay; peers, peers-latency, peers-kill
run       rounds, interleaved
report    tables and JSON; `plot` the picture, `page` figures of the ledger for the docs, `versus` those of the peers
endurance the long run, a separate command
loaded    submit to finish over HTTP on busy cores, step by step; a separate command
"""
