"""The walks of the architecture page are the files that a job really passes through."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import MakeServer
from tools.walks import PAGE, WALKS, Tracer, walks_on_page

#: Most files that a walk may have, Python and Lua. Lower it when a walk becomes shorter.
LIMITS = {"run": 28, "http": 24, "replay": 43}


def on_page() -> dict[str, dict[str, str]]:
    return walks_on_page(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_every_walk() -> None:
    assert set(on_page()) == set(WALKS)


def test_every_file_says_what_happens_there() -> None:
    assert [file for walk in on_page().values() for file, text in walk.items() if not text.strip()] == []


@pytest.mark.parametrize("walk", WALKS)
def test_the_walk_is_the_traced_one(walk: str, make_redis: MakeServer, postgres_url: str) -> None:
    # A process for each: imports of other tests, and their settings, would be part of it.
    redis_url = make_redis().url
    command = [sys.executable, "-m", "tools.walks", walk, "--redis", redis_url, "--ledger", postgres_url, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    done = subprocess.run(
        command, cwd=PAGE.parents[2], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    traced = set(json.loads(done.stdout.splitlines()[-1])[walk])
    assert set(on_page()[walk]) == traced, f"run `python -m tools.walks {walk}`"
    assert len(traced) <= LIMITS[walk]


def test_the_tracer_leaves_out_imports_and_pauses() -> None:
    from holdfast.core import text
    from holdfast.core.retry import duration_ms

    tracer = Tracer()
    with tracer.running():
        # The body of a module, which calls functions of others.
        exec(  # noqa: S102 - imports nothing, but is entered like a module
            compile("duration_ms(1, 'x')", "module.py", "exec"), {"duration_ms": duration_ms}
        )
        with tracer.paused():
            duration_ms(1, "x")
        text.check_name("a", "queue")
    assert list(tracer.files) == ["core/text.py"]
