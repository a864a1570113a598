"""A projector in a child process, to be killed: `-m tests.upkeep.projector_process REDIS LEDGER NAMESPACE`."""

from __future__ import annotations

import asyncio
import sys

from tests.upkeep.projector_rig import ProjectorRig


async def main(redis_url: str, ledger_url: str, namespace: str) -> None:
    async with ProjectorRig(redis_url, ledger_url, namespace) as rig:
        projector = rig.projector()
        await projector._engine.open()
        print("ready", flush=True)
        await projector.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
