"""requirements/: every dependency is pinned with hashes, and no file of the project names a package host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import packages
from tools.dist import ROOT

FILE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = FILE["project"]
SHIPPED: list[str] = [*FILE["tool"]["hatch"]["build"]["targets"]["sdist"]["include"], "pyproject.toml"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
HOSTS = re.compile(r"pythonhosted\.|pypi\.org|maven\.org|/maven2|debian\.org|npmjs\.")


def list_requirements(extra: str) -> list[Requirement]:
    """Return the requirements of an extra, including those of the extras that it names."""
    found = []
    for requirement in (Requirement(text) for text in EXTRAS[extra]):
        found += (
            [one for name in requirement.extras for one in list_requirements(name)]
            if requirement.name == "holdfast"
            else [requirement]
        )
    return found


@pytest.mark.parametrize(("name", "extra"), [("base", ""), ("test", "test"), ("dev", "dev")])
def test_every_requirement_of_the_project_is_pinned(name: str, extra: str) -> None:
    pins = packages.read_pins(name)
    requirements = [Requirement(text) for text in PROJECT["dependencies"]] + (list_requirements(extra) if extra else [])
    wrong = [
        str(requirement)
        for requirement in requirements
        if (pin := pins.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(pin.version)
    ]
    assert wrong == [], "run `make pins`"


def test_every_pin_has_hashes() -> None:
    for file in packages.REQUIREMENTS.glob("*.txt"):
        for name, pin in packages.read_pins(file.stem).items():
            assert str(pin.requirement.specifier).startswith("=="), name
            assert pin.hashes, name
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in pin.hashes), name


@pytest.mark.parametrize(("part", "whole"), [("base", "test"), ("test", "dev")])
def test_the_files_pin_the_same_versions(part: str, whole: str) -> None:
    larger = packages.read_pins(whole)
    for name, pin in packages.read_pins(part).items():
        assert (pin.version, pin.hashes) == (larger[name].version, larger[name].hashes), name


def test_no_file_names_a_host() -> None:
    tops = [top for pattern in SHIPPED for top in ROOT.glob(pattern.lstrip("/"))]
    files = [file for top in tops for file in (top.rglob("*") if top.is_dir() else [top]) if file.is_file()]
    wrong = [
        f"{file.relative_to(ROOT)}: {found[0]}"
        for file in files
        if file.suffix != ".pyc"
        and file != Path(__file__)
        and (found := HOSTS.search(file.read_text(errors="replace")))
    ]
    assert len(files) > 900
    assert wrong == []
