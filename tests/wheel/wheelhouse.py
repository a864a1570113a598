"""Wheels for clean environments: holdfast's own, built from this tree, and those of all packages that it may need.

The latter are packed from the environment that runs the tests. So pip resolves and installs as for a user, with the
pinned versions, and downloads nothing.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from tools.packages import closure, wheel_metadata

ROOT: Final = Path(__file__).resolve().parents[2]
#: Written by an installer, not part of a wheel.
_INSTALLED: Final = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json")


def build(folder: Path) -> Path:
    """Build holdfast's wheel and all wheels that it needs with all extras into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--isolated", "wheel", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([*command, *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("holdfast-*.whl")
    for name in sorted(closure(wheel_metadata(wheel), ["all"]).keys() - {"holdfast"}):
        _pack(distribution(name), folder)
    return wheel


def _pack(package: Distribution, folder: Path) -> None:
    wheel_file = HeaderParser().parsestr(package.read_text("WHEEL") or "")
    tags = [tag.split("-") for tag in wheel_file.get_all("Tag", [])]
    tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
    name = canonicalize_name(package.name).replace("-", "_")
    files = [str(file) for file in package.files or [] if _belongs(str(file))]
    (record,) = (str(file) for file in package.files or [] if str(file).endswith(".dist-info/RECORD"))
    # Not compressed, because they are unpacked within seconds.
    with zipfile.ZipFile(folder / f"{name}-{package.version}-{tag}.whl", "w") as archive:
        for file in files:
            archive.write(str(package.locate_file(file)), file)
        archive.writestr(record, "".join(f"{file},,\n" for file in (*files, record)))


def _belongs(file: str) -> bool:
    # Scripts are outside; pip creates those that a package declares.
    return not file.startswith(("..", "/")) and not file.endswith((".pyc", *_INSTALLED))
