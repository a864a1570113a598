"""The patches of all mutants apply to the code, and every check has a mutant on both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants import ROOT, Broken, Mutant, Patch, apply, load

SUITE, MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.engine}: {mutant.check}")
def test_every_patch_applies_exactly_once(mutant: Mutant, tmp_path: Path) -> None:
    for patch in mutant.patches:
        (tmp_path / patch.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / patch.file).write_text((ROOT / "src" / patch.file).read_text(encoding="utf-8"), encoding="utf-8")
    apply(mutant, tmp_path)
    for patch in mutant.patches:
        assert patch.new in (tmp_path / patch.file).read_text(encoding="utf-8")


def test_a_patch_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n", encoding="utf-8")
    for old in ("x = 1", "y = 1"):
        with pytest.raises(Broken, match="must occur once"):
            apply(Mutant("c", "e", (Patch("a.py", old, ""),)), tmp_path)


@pytest.mark.parametrize("engine", ["redis", "sqlite"])
@pytest.mark.parametrize(
    "check",
    ["lease check at settle", "ownership check at renew", "deduplication", "delivery count in the fence", "DLQ order"],
)
def test_every_guarantee_has_a_mutant_on_each_engine(engine: str, check: str) -> None:
    assert any(mutant.engine == engine and mutant.check.startswith(check) for mutant in MUTANTS)
    assert engine in SUITE.tests
    assert engine in SUITE.smoke
