"""Write the bill of materials of a wheel: CycloneDX JSON with all dependencies, including extras.

It is read from the metadata of the wheel and of the installed packages, which are the pinned ones, without network.
Dependencies of other platforms or Pythons are left out.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from tools.packages import closure, installed_metadata, wheel_metadata

#: For developers of holdfast, not for its users.
_OWN_EXTRAS: Final = frozenset({"dev", "test"})
_CLASSIFIER: Final = "License :: OSI Approved :: "


def write_sbom(wheel: Path, file: Path) -> None:
    """Write the wheel's bill of materials."""
    file.write_text(JsonV1Dot6(_bill(wheel)).output_as_string(indent=2) + "\n")


def _bill(wheel: Path) -> Bom:
    facts = wheel_metadata(wheel)
    extras = sorted(set(facts.get_all("Provides-Extra", [])) - _OWN_EXTRAS)
    base, graph = closure(facts, []), closure(facts, extras)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    root = _component(facts)
    root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
    own = canonicalize_name(facts["Name"])
    components = {own: root} | {
        name: _component(installed_metadata(name), ComponentScope.REQUIRED if name in base else ComponentScope.OPTIONAL)
        for name in graph
        if name != own
    }
    bom = Bom(components=[component for name, component in components.items() if name != own])
    bom.metadata.component = root
    bom.metadata.timestamp = _timestamp()
    # Derived from the digest, so that the same wheel has the same bill.
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, digest)
    for name, needs in graph.items():
        bom.register_dependency(components[name], [components[need] for need in sorted(needs)])
    return bom


def _component(facts: Message, scope: ComponentScope | None = None) -> Component:
    name, version = canonicalize_name(facts["Name"]), facts["Version"]
    purl = PackageURL("pypi", name=name, version=version)
    licences = LicenseFactory()
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        scope=scope,
        description=facts.get("Summary"),
        licenses=[licences.make_from_string(text) for text in _licences(facts)],
    )


def _licences(facts: Message) -> list[str]:
    """The package's SPDX expression if it has one, else its own name of the licence."""
    if expression := facts.get("License-Expression"):
        return [expression]
    classifiers = [text for text in facts.get_all("Classifier", []) if text.startswith(_CLASSIFIER)]
    text = facts.get("License", "").strip()
    # Some packages put the whole text of the licence there.
    named = [text] if text and "\n" not in text else []
    return named or [classifier.removeprefix(_CLASSIFIER) for classifier in classifiers]


def _timestamp() -> datetime:
    """Time of the build, or SOURCE_DATE_EPOCH: https://reproducible-builds.org/specs/source-date-epoch/."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
