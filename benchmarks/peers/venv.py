"""The peers' environments: one each in `.servers/peers/<name>`, with pinned versions, made when first needed.

What cannot be installed is not measured, and the report says why.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.servers import WHEELS

FOLDER: Final = WHEELS / "peers"
#: What our end of the line needs.
_COMMON: Final = ("uvloop==0.23.0", "msgspec==0.22.0")
_REDIS: Final = ("redis==8.1.0", "hiredis==3.5.0")
_AT_ONCE: Final = 4
_INSTALL_WITHIN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Environment:
    """One peer, and its drivers at their fastest."""

    peer: str
    with_packages: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return self.peer.partition("==")[2]

    @property
    def pins(self) -> tuple[str, ...]:
        """All that is requested by name."""
        return (self.peer, *self.with_packages, *_COMMON)


#: Name → what is in its environment. arq and saq take no newer client of Redis, streaq has its own; saq does
#: not name all that it imports.
PEERS: Final = {
    "celery": Environment("celery[redis]==5.7.0", ("kombu==5.7.0", *_REDIS)),
    "dramatiq": Environment("dramatiq[redis]==2.2.1", _REDIS),
    "rq": Environment("rq==2.12.0", _REDIS),
    "arq": Environment("arq==0.28.0", ("redis==5.3.1", "hiredis==3.5.0")),
    "taskiq": Environment("taskiq==0.13.0", ("taskiq-redis==1.2.4", *_REDIS)),
    "saq": Environment("saq[redis,hiredis]==0.26.4", ("redis==7.4.1", "hiredis==3.5.0", "typing-extensions==4.15.0")),
    "streaq": Environment("streaq==7.2.0", ("coredis==6.9.0",)),
    "huey": Environment("huey==3.5.4", _REDIS),
    "docket": Environment("pydocket==0.22.0", _REDIS),
    "taskito": Environment("taskito==0.22.0"),
    "pgqueuer": Environment("pgqueuer==1.6.0", ("asyncpg==0.32.0",)),
    "procrastinate": Environment("procrastinate==3.10.0", ("psycopg[binary,pool]==3.3.8", "psycopg-pool==3.3.3")),
    "dbos": Environment("dbos==3.3.0", ("psycopg[binary,pool]==3.3.8", "psycopg-pool==3.3.3", "sqlalchemy==2.1.8")),
    "faststream": Environment("faststream[kafka,rabbit]==0.7.8", ("aiokafka==0.14.0", "aio-pika==10.2.1", *_REDIS)),
}


def python(name: str) -> str:
    """The interpreter of a peer's environment."""
    return str(_folder(name) / "bin" / "python")


def ensure(names: Iterable[str], say: Callable[[str], None] | None = None) -> dict[str, str]:
    """Install what is missing; for each peer its version, or the reason why it is missing (in brackets)."""
    requested = tuple(dict.fromkeys(names))
    found = {name: PEERS[name].version for name in requested if _is_installed(name)}
    missing = [name for name in requested if name not in found]
    report = say or _on_stderr
    if missing:
        report(f"installing {', '.join(missing)} in {FOLDER}")

    def install(name: str) -> str:
        reason = _install(name)
        report(f"{name}: {reason}" if reason else f"{name} {PEERS[name].version}: installed")
        return f"({reason})" if reason else PEERS[name].version

    # Each for itself: one that cannot be had does not keep the others away.
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found |= zip(missing, threads.map(install, missing), strict=True)
    return {name: found[name] for name in requested}


def is_there(version: str) -> bool:
    """Whether `ensure` found a version, and not a reason."""
    return not version.startswith("(")


def _folder(name: str) -> Path:
    return FOLDER / name


def _stamp(name: str) -> Path:
    return _folder(name) / "installed.json"


def _is_installed(name: str) -> bool:
    try:
        known = json.loads(_stamp(name).read_text())
    except (OSError, ValueError):
        return False
    return bool(known == list(PEERS[name].pins) and Path(python(name)).exists())


def _install(name: str) -> str:
    """Empty, or the reason of the failure. The stamp is written last: an interrupted installation is repeated."""
    folder, pins = _folder(name), PEERS[name].pins
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv")
    if uv:
        make = [uv, "venv", "--quiet", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--quiet", "--python", python(name)]
    else:
        make = [sys.executable, "-m", "venv", str(folder)]
        install = [python(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    reason = _run(make) or _run([*install, *pins])
    if not reason:
        _stamp(name).write_text(json.dumps(pins))
    return reason


def _run(command: Sequence[str]) -> str:
    """Nothing, or the last line of what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"not installed: {exc}"
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return f"not installed: {lines[-1].strip()}"


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
