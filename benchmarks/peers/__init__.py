"""Other task systems on Redis and on PostgreSQL, measured in the same run as ours.

They are installed in separate environments (`venv.py`), never in ours: a script here runs there, and imports nothing of
holdfast. `field.py` lists them. Each has three roles, and is asked the same over `benchmarks.sides.channel`:

`produce` submits, while no worker runs unless stated otherwise.

- `install()`: what a fresh store needs (tables); nothing on Redis. Called once after every reset of the store.
- `single(jobs)`: one by one, each acknowledged before the next. → `rate`, `cpu_us`
- `bulk(jobs)`: by its documented way for many, else one by one; `Peer.bulk` says which. → `rate`, `cpu_us`
- `paced(jobs)`: at low load; the instant of submission goes along as the argument.
- `slow(jobs)`: queues jobs 0 … jobs - 1 of 50 ms each for `slow_work`.

`work` is one worker process.

- `start(limit)`: begins to drain; every job counts itself on the board. `limit` is always None.
- `listen()`, then `latencies()` as often as wanted: → `late_ns`, of the jobs since the last question.
- `report()`: → `cpu_s` since the first execution, and `rss`, of this one process: in this role none forks.

`slow_work` is a worker process for the test with kill -9: ten jobs at a time, each appends a line to the file that the
setting `log` names when it starts and when it ends (`benchmarks.sides.diary`).

- `start()`: begins.

`Child.kill()` ends it, and all that it has forked, in the middle of its work; a second `slow_work` with the same
settings continues. The setting `tuned` is true where its documented settings for crashes are asked for and not its
defaults (`Peer.tuned` says which; empty where there are none to set). `produce` and `slow_work` are given the same.
"""
