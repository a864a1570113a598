"""`pip install holdfast && holdfast demo` in the clean environment of the base install; the size of that install."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.wheel.environments import TIMEOUT_S, Environment, settings

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

#: Maximum size of a base install on disk.
MEGABYTES: Final = 100


@pytest.mark.slow
def test_the_demo_succeeds_and_uses_no_other_store(base: Environment, tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text('namespace = "production"\n')
    other_stores = settings(
        url=f"sqlite:///{tmp_path}/jobs.db", ledger=f"sqlite:///{tmp_path}/ledger.db", token="hf_forged"
    )
    done = base.run("-m", "holdfast", "demo", cwd=tmp_path, **other_stores)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every job ended as expected" in done.stdout
    assert "lease lost" in done.stdout
    assert "WRONG" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["holdfast.toml"]


def test_the_base_install_is_small(base: Environment) -> None:
    sizes = [path.stat().st_size for path in base.packages.rglob("*") if path.is_file()]
    assert len(sizes) > 1000
    assert sum(sizes) <= MEGABYTES * 1_000_000
