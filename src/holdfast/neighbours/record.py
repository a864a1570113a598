"""The record of a process: a memory-mapped file that still exists when its process has been killed.

It has the facts that identify the process, and the jobs that it had claimed but not started. Jobs that start at once,
the common case, cost nothing; a list is extended once per batch of claims that leaves jobs waiting, and each start of
such a job is one aligned store of 8 bytes. No system call is made after the creation.

The layout, in bytes:

    0       magic
    8       state: bytes of the list, its jobs that have started, which of the two buffers has it
    16      length of the facts, and the facts as msgpack
    32,768  two buffers; a list is job ids, each followed by a zero byte

A list is written to the buffer that is not in use, or to the end of the one in use; then the state is stored. A start
is stored before the code of the job is called. A process killed between the two leaves a list of the past, or jobs that
count as started: a job whose code may have begun is never one that has not started.

Whatever cannot be read counts as started. Files are read as data from outside.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec

from holdfast.identity import parse_identity
from holdfast.neighbours.directory import DirectoryRefused, default_directory, open_directory
from holdfast.neighbours.host import Host, read_host, read_stat

_log: Final = logging.getLogger("holdfast.neighbours")

_MAGIC: Final = b"hfproc1\n"
_STATE_AT: Final = 8
_STATE_WORD: Final = _STATE_AT // 8
_LENGTH_AT: Final = 16
_FACTS_AT: Final = 20
FACTS_END: Final = 32_768
_BUFFER: Final = 65_536
SIZE: Final = FACTS_END + 2 * _BUFFER

_FIELD_BITS: Final = 24
_MASK: Final = (1 << _FIELD_BITS) - 1
_ONE_STARTED: Final = 1 << _FIELD_BITS
_BUFFER_BIT: Final = 1 << 2 * _FIELD_BITS

_Text = Annotated[str, msgspec.Meta(max_length=1_000)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ProcessFacts(msgspec.Struct, frozen=True):
    """What identifies a process and its leases. Does not change."""

    identity: _Text
    #: Which store the leases are in. Processes of different stores do not read each other's records.
    store: _Text
    queues: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=1_000)]
    #: Whether it runs jobs that must run alone.
    isolated: bool
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    started_at: _Number
    boot_id: _Text
    host: _Text
    pid_namespace: _Number
    time_namespace: _Number

    @property
    def location(self) -> Host:
        """The host of the process."""
        return Host(self.boot_id, self.host, self.pid_namespace, self.time_namespace)

    @property
    def file_name(self) -> str:
        """The name of its record."""
        return f"{self.pid}-{hashlib.sha256(self.identity.encode(errors='replace')).hexdigest()[:32]}"


class ProcessRecord:
    """The record of one worker of this process. Use it on one event loop."""

    def __init__(self, facts: ProcessFacts, directory: int) -> None:
        """`directory` is a descriptor that the record closes. Raises `OSError`."""
        self._name = facts.file_name
        self._directory = directory
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        unfinished = f".{self._name}"
        file = os.open(unfinished, flags, 0o600, dir_fd=directory)
        try:
            # Reserves the memory: on a full file system a later write would end the process with SIGBUS.
            if os.pwrite(file, bytes(SIZE), 0) != SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._map = mmap.mmap(file, SIZE)
            encoded = msgspec.msgpack.encode(facts)
            if len(encoded) > FACTS_END - _FACTS_AT:
                raise OSError(f"the facts of the process have {len(encoded)} bytes")
            self._map[_LENGTH_AT : _FACTS_AT + len(encoded)] = struct.pack("<I", len(encoded)) + encoded
            self._map[: len(_MAGIC)] = _MAGIC
            # Others read it once, when it is complete.
            os.rename(unfinished, self._name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(unfinished, dir_fd=directory)
            raise
        finally:
            os.close(file)
        self._words = memoryview(self._map).cast("Q")
        self._state = 0
        #: Jobs of the list that have not started.
        self._unstarted = 0

    @classmethod
    def create(
        cls,
        identity: str,
        store: str,
        queues: Iterable[str],
        *,
        isolated: bool = False,
        path: Path | None = None,
    ) -> Self | None:
        """Create the record of a worker of this process. None where processes cannot be identified.

        None as well if its directory cannot be used, which is logged: other processes then wait for its leases.
        """
        facts = describe_process(identity, store, queues, isolated=isolated)
        if facts is None:
            return None
        try:
            directory = open_directory(path or default_directory())
        except DirectoryRefused as exc:
            _log.warning("no process record, leases of this worker expire only after their time: %s", exc)
            return None
        try:
            return cls(facts, directory)
        except OSError as exc:
            os.close(directory)
            _log.warning("no process record, leases of this worker expire only after their time: %s", exc)
            return None

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return self._name

    def add_waiting(self, job_ids: Sequence[str]) -> bool:
        """Record further claimed jobs that have not started, in the order in which they will start.

        Returns False if the list has to be written again, by `set_waiting`.
        """
        data, length = _encode(job_ids), self._state & _MASK
        if not self._unstarted or not data or length + len(data) > _BUFFER:
            return False
        start = _buffer_at(self._state) + length
        self._map[start : start + len(data)] = data
        self._state += len(data)
        self._words[_STATE_WORD] = self._state
        self._unstarted += len(job_ids)
        return True

    def set_waiting(self, job_ids: Sequence[str]) -> None:
        """Record all claimed jobs that have not started, in the order in which they will start.

        If they do not fit, the rest is not recorded: these jobs count as started.
        """
        if not job_ids and not self._unstarted:
            return
        data, count = _encode(job_ids), len(job_ids)
        if len(data) > _BUFFER:
            data = data[: data.rindex(b"\0", 0, _BUFFER) + 1]
            count = data.count(b"\0")
        other = ~self._state & _BUFFER_BIT
        start = _buffer_at(other)
        self._map[start : start + len(data)] = data
        self._state = other | len(data)
        self._words[_STATE_WORD] = self._state
        self._unstarted = count if data else 0

    def mark_started(self) -> None:
        """Record that the next waiting job starts. Call it before its code."""
        if self._unstarted:
            self._unstarted -= 1
            self._state += _ONE_STARTED
            self._words[_STATE_WORD] = self._state

    def touch(self) -> None:
        """Set the file's modification time: it shows until when the process ran."""
        try:
            os.utime(self._name, dir_fd=self._directory, follow_symlinks=False)
        except OSError as exc:
            _log.debug("record %s not touched: %s", self._name, exc)

    def close(self) -> None:
        """Remove the file: the worker has ended in order. Can be repeated."""
        if self._directory < 0:
            return
        try:
            os.unlink(self._name, dir_fd=self._directory)
        except OSError as exc:
            _log.debug("record %s not removed: %s", self._name, exc)
        os.close(self._directory)
        self._directory = -1
        self._unstarted = 0
        self._words.release()
        self._map.close()


def _buffer_at(state: int) -> int:
    return FACTS_END + (_BUFFER if state & _BUFFER_BIT else 0)


def _encode(job_ids: Sequence[str]) -> bytes:
    """A list of jobs. Empty if an id has a zero byte: positions in the list would not be those of the jobs."""
    if not job_ids:
        return b""
    data = "\0".join(job_ids).encode("utf-8", "surrogatepass") + b"\0"
    return data if data.count(b"\0") == len(job_ids) else b""


def describe_process(
    identity: str, store: str, queues: Iterable[str], *, isolated: bool = False
) -> ProcessFacts | None:
    """The facts of a worker of this process; None where processes cannot be identified."""
    host, own = read_host(), read_stat(os.getpid())
    if host is None or own is None:
        return None
    return ProcessFacts(
        identity=identity,
        store=store,
        queues=tuple(queues),
        isolated=isolated,
        pid=os.getpid(),
        started_at=own.started_at,
        boot_id=host.boot_id,
        host=host.name,
        pid_namespace=host.pid_namespace,
        time_namespace=host.time_namespace,
    )


# Reading ---------------------------------------------------------------------------------------------


class WaitingJobs:
    """The jobs that a process had claimed but not started when it ended."""

    def __init__(self, job_ids: frozenset[str] = frozenset()) -> None:
        self._job_ids = job_ids

    def __len__(self) -> int:
        return len(self._job_ids)

    def has_started(self, job_id: str) -> bool:
        """Whether code of this job may have run."""
        return job_id not in self._job_ids


def read_record(name: str, directory: int, size: int = SIZE) -> bytes:
    """The content of a record, or its start; empty if it is not a regular file of this user, or too large."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=directory)
    except OSError:
        return b""
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != SIZE:
            return b""
        return os.pread(file, size, 0)
    except OSError:
        return b""
    finally:
        os.close(file)


_decoder: Final = msgspec.msgpack.Decoder(ProcessFacts)


def parse_facts(data: bytes) -> ProcessFacts | None:
    """The facts in a record, of which the first `FACTS_END` bytes are enough; None if it is not valid."""
    if len(data) < FACTS_END or data[: len(_MAGIC)] != _MAGIC:
        return None
    (length,) = struct.unpack_from("<I", data, _LENGTH_AT)
    if length > FACTS_END - _FACTS_AT:
        return None
    try:
        facts = _decoder.decode(data[_FACTS_AT : _FACTS_AT + length])
    except (ValueError, RecursionError):
        return None
    # A record is about the process in the name that the leases have, and about no other.
    named = parse_identity(facts.identity)
    return facts if named is not None and (named.pid, named.host) == (facts.pid, facts.host) else None


def parse_waiting(data: bytes) -> WaitingJobs:
    """The jobs in a record that have not started. Empty, so that every job counts as started, if it is not valid."""
    if len(data) != SIZE or data[: len(_MAGIC)] != _MAGIC:
        return WaitingJobs()
    (state,) = struct.unpack_from("=Q", data, _STATE_AT)
    length, started = state & _MASK, state >> _FIELD_BITS & _MASK
    if state >= 2 * _BUFFER_BIT or length > _BUFFER:
        return WaitingJobs()
    start = _buffer_at(state)
    encoded = data[start : start + length]
    if not encoded.endswith(b"\0"):
        return WaitingJobs()
    try:
        job_ids = encoded[:-1].decode("utf-8", "surrogatepass").split("\0")
    except UnicodeDecodeError:
        return WaitingJobs()
    # A job that waits again has been started before.
    return WaitingJobs(frozenset(job_ids[started:]) - frozenset(job_ids[:started]))
