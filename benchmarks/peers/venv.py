"""The peers' environment: `.servers/peers`, with pinned versions, made when it is first needed.

What cannot be installed is not measured, and the report says why.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from tools.servers import WHEELS

FOLDER: Final = WHEELS / "peers"
PYTHON: Final = FOLDER / "bin" / "python"
#: Name → the peer itself.
PEERS: Final = {
    "pgqueuer": "pgqueuer==1.6.0",
    "procrastinate": "procrastinate==3.10.0",
    "dbos": "dbos==3.3.0",
    "faststream": "faststream[kafka,rabbit]==0.7.8",
}
#: Their drivers at their fastest, and what our end of the line needs.
_BESIDE: Final = (
    "asyncpg==0.32.0",
    "psycopg[binary,pool]==3.3.8",
    "psycopg-pool==3.3.3",
    "uvloop==0.23.0",
    "msgspec==0.22.0",
    "sqlalchemy==2.1.8",
    "aiokafka==0.14.0",
    "aio-pika==10.2.1",
    "redis==8.1.0",
    "hiredis==3.5.0",
)
_STAMP: Final = FOLDER / "installed.json"
_INSTALL_WITHIN_S: Final = 600.0


def ensure() -> dict[str, str]:
    """Install what is missing; for each peer its version, or why it is not there (then in brackets)."""
    wanted = {**PEERS, "beside": " ".join(_BESIDE)}
    known = _known()
    if known is not None and known["wanted"] == wanted and PYTHON.exists():
        found: dict[str, str] = known["found"]
        return found
    found = _install()
    if all(is_there(version) for version in found.values()):
        _STAMP.write_text(json.dumps({"wanted": wanted, "found": found}))
    return found


def is_there(version: str) -> bool:
    """Whether `ensure` found a version, and not a reason."""
    return not version.startswith("(")


def _known() -> dict[str, dict[str, str]] | None:
    try:
        known: dict[str, dict[str, str]] = json.loads(_STAMP.read_text())
    except (OSError, ValueError):
        return None
    return known


def _install() -> dict[str, str]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv")
    make = [uv, "venv", "--quiet", "--python", sys.executable, str(FOLDER)] if uv else None
    if why := _run(make or [sys.executable, "-m", "venv", str(FOLDER)]):
        return dict.fromkeys(PEERS, f"({why})")
    if uv:
        install = [uv, "pip", "install", "--quiet", "--python", str(PYTHON)]
    else:
        install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if why := _run([*install, *_BESIDE]):
        return dict.fromkeys(PEERS, f"({why})")
    # One after the other: one that cannot be had does not keep the others away.
    return {name: _outcome(pin, _run([*install, pin, *_BESIDE])) for name, pin in PEERS.items()}


def _outcome(pin: str, why: str) -> str:
    return f"({why})" if why else pin.partition("==")[2]


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
