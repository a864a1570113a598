"""Build a release: sdist, a wheel made from that sdist, its bill of materials, and their checksums.

    python -m tools.dist [FOLDER]     default: dist

Needs no network: the build tool is a pinned package.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.packages import wheel_metadata
from tools.sbom import write_sbom

ROOT: Final = Path(__file__).resolve().parent.parent
CHECKSUMS: Final = "SHA256SUMS"
#: A reserved top-level domain (RFC 2606).
_RESERVED: Final = ".example/"


def build(folder: Path) -> None:
    """Build into `folder`. Raises `CalledProcessError` if the metadata do not pass `twine check --strict`."""
    shutil.rmtree(folder, ignore_errors=True)
    _python("build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    built = sorted(folder.iterdir())
    _python("twine", "check", "--strict", *map(str, built))
    (wheel,) = folder.glob("*.whl")
    write_sbom(wheel, folder / f"{wheel.name.removesuffix('.whl')}.cdx.json")
    rows = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("".join(rows))
    if any(_RESERVED in url for url in wheel_metadata(wheel).get_all("Project-URL", [])):
        print("project URLs are placeholders; set [project.urls] in pyproject.toml before a release", file=sys.stderr)


def _python(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").absolute())
