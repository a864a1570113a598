"""Failures reach Sentry, set up as the how-to says: with the real SDK, in a separate process, without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.docs.test_examples import ROOT, code_of

#: Appended to the page's script.
_PROGRAM = """
import json, logging

sent.clear()


class Api:
    token = "hunter2"


@app.task(retry=Retry(max_retries=0))
def leak(password: str) -> None:
    logging.getLogger("shop").warning("connecting with password=%s", password)
    try:
        raise OSError(f"Authorization: Bearer {password}")
    except OSError as exc:
        raise RuntimeError(f"no answer for token={Api.token}") from exc


@app.task(retry=Retry(max_retries=0), process=True)
def in_a_child() -> None:
    raise LookupError("in the child, api_key=hunter2")


async def more() -> None:
    async with app:
        leaked = await leak.submit("hunter2")
        child = await in_a_child.submit()
        while len(sent) < 2:
            await drain(app)
            await asyncio.sleep(0.01)
        print(json.dumps({"events": sent, "leaked": leaked.id, "child": child.id}))


if __name__ == "__main__":
    asyncio.run(more())
"""


def run(folder: Path) -> str:
    code = code_of(ROOT / "docs" / "how-to" / "sentry.md").replace("asyncio.run(main())", "")
    (folder / "program.py").write_text(code + _PROGRAM, encoding="utf-8")
    command = [sys.executable, "-W", "error", "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_events_name_the_job_and_hold_no_secret(tmp_path: Path) -> None:
    printed = run(tmp_path)
    found = msgspec.json.decode(printed)
    by_job = {event["tags"]["job_id"]: event for event in found["events"]}
    assert set(by_job) == {found["leaked"], found["child"]}
    leaked, child = by_job[found["leaked"]], by_job[found["child"]]
    assert [value["type"] for value in leaked["exception"]["values"]] == ["OSError", "RuntimeError"]
    assert leaked["tags"] == {
        "job_id": found["leaked"],
        "task": "leak",
        "queue": "default",
        "tenant_id": "default",
        "code": "TASK_ERROR",
    }
    frames = leaked["exception"]["values"][-1]["stacktrace"]["frames"]
    assert frames[-1]["function"] == "leak"
    assert any("password=***" in crumb["message"] for crumb in leaked["breadcrumbs"]["values"])
    assert child["tags"]["task"] == "in_a_child"
    assert "LookupError" in child["exception"]["values"][-1]["value"]
    assert "hunter2" not in printed
