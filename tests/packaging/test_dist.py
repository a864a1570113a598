"""The output of `make dist`: a wheel and an sdist with the right files, a bill of materials, checksums."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tools import dist, packages

ROOT = dist.ROOT


def files_below(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder.parent).as_posix() for path in paths}


@pytest.mark.slow
def test_a_release_has_the_right_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    folder = tmp_path / "dist"
    # Raises if `twine check --strict` reports a problem.
    dist.build(folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    (bill,) = folder.glob("*.cdx.json")

    names = set(zipfile.ZipFile(wheel).namelist())
    package = files_below(ROOT / "src" / "holdfast") | {"holdfast_pytest.py"}
    dist_info = {name for name in names if ".dist-info/" in name}
    assert names - dist_info == package
    assert "holdfast/py.typed" in names
    assert {Path(name).suffix for name in package} >= {".py", ".lua", ".sql"}
    assert any(name.endswith("/licenses/LICENSE") for name in dist_info)

    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside >= {f"src/{name}" for name in package}
    assert inside >= {"LICENSE", "README.md", "Makefile", "pyproject.toml", "PKG-INFO", "tools/bootstrap.sh"}
    assert inside >= {f"requirements/{path.name}" for path in packages.REQUIREMENTS.iterdir()}
    assert inside >= {f"tests/packaging/{Path(__file__).name}", "examples/quickstart.py", "docs/index.md"}
    assert not any(part in name for name in inside for part in (".venv", ".servers", "__pycache__", ".git/"))

    # `build` made the wheel from the sdist; a build from the tree must be identical.
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(tmp_path / "again"),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()

    subprocess.run(["sha256sum", "--check", "--strict", dist.CHECKSUMS], cwd=folder, check=True, capture_output=True)
    listed = [line.split()[1] for line in (folder / dist.CHECKSUMS).read_text().splitlines()]
    assert listed == sorted(path.name for path in (wheel, sdist, bill))

    metadata = packages.wheel_metadata(wheel)
    links = dict(text.split(", ") for text in metadata.get_all("Project-URL", []))
    assert set(links) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in links.values())
    check_bill(bill.read_text(), metadata["Version"])


def check_bill(text: str, version: str) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill: dict[str, Any] = json.loads(text)
    assert bill["metadata"]["timestamp"] == "2027-01-15T08:00:00+00:00"
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"], root["hashes"][0]["alg"]) == ("holdfast", version, "SHA-256")
    scopes = {component["name"]: component["scope"] for component in bill["components"]}
    assert {name for name, scope in scopes.items() if scope == "required"} == set(packages.read_here("base"))
    assert {"redis", "asyncpg", "fastapi", "confluent-kafka"} <= scopes.keys() - set(packages.read_here("base"))
    assert not {"pytest", "ruff", "twine", "holdfast"} & scopes.keys()
    pins = packages.read_pins("dev")
    assert {component["name"]: component["version"] for component in bill["components"]} == {
        name: pins[name].version for name in scopes
    }
    edges = {edge["ref"]: edge.get("dependsOn", []) for edge in bill["dependencies"]}
    assert f"pkg:pypi/typer@{pins['typer'].version}" in edges[root["bom-ref"]]
    assert (
        f"pkg:pypi/pydantic-core@{pins['pydantic-core'].version}"
        in edges[f"pkg:pypi/pydantic@{pins['pydantic'].version}"]
    )
    assert all(component.get("licenses") for component in bill["components"])
