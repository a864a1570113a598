"""Named components of the OpenAPI document for the app's tasks: their arguments and submissions.

Code generators create a class for every component, so names are unique and do not depend on registration order. Names
of the API's components never change: a type of the app that has the name of one of them, or of a different type of
another task, gets the task's name as prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from typing import Any, Final

import msgspec

from holdfast.app import Holdfast
from holdfast.execution.task_schema import NOT_DESCRIBED, Schema, resolve_refs, schemas_of

REFS: Final = "#/components/schemas/{name}"
_WORDS: Final = re.compile(r"[A-Za-z0-9]+")

_SAMPLES: Final[dict[Any, Any]] = {int: 1, float: 1, str: "text", bool: True}


class TaskSchemas:
    """Components for the tasks of an app. `taken`: names of the API's components."""

    def __init__(self, app: Holdfast, used_names: Iterable[str]) -> None:
        self.components: dict[str, Schema] = {}
        self._used_names = {name.lower() for name in used_names}
        self._structs = {name: task.spec.arguments.struct for name, task in app.tasks.items()}
        self._stems = _stems(app.tasks)
        #: Component names by type name and its transitive schema: tasks that share a type share its component.
        self._known: dict[tuple[str, bytes], str] = {}
        self._arguments = {name: self._describe(name, self._structs[name]) for name in self._stems}

    def submission(self, title: str, base: Mapping[str, Any], pattern: str) -> Schema:
        """Schema for a submission of any task: one variant of `base` per task, named by `pattern`."""
        refs = {}
        for task, stem in self._stems.items():
            schema = self._to_task_schema(base, task)
            refs[task] = self._add(pattern.format(stem), stem, schema)
        return {
            "title": title,
            "oneOf": [{"$ref": ref} for ref in refs.values()],
            "discriminator": {"propertyName": "task", "mapping": refs},
        }

    def example(self) -> Schema | None:
        """Example submission of the first task whose required arguments are plain values."""
        for task in self._stems:
            needed = [field for field in msgspec.structs.fields(self._structs[task]) if field.required]
            if all(isinstance(field.type, type) and field.type in _SAMPLES for field in needed):
                return {"task": task, "payload": {field.encode_name: _SAMPLES[field.type] for field in needed}}
        return None

    def _to_task_schema(self, base: Mapping[str, Any], task: str) -> Schema:
        ref = self._arguments[task]
        needed = self.components[ref.rpartition("/")[2]].get("required")
        own = {"task": {"type": "string", "const": task}, "payload": {"$ref": ref}}
        required = [*base["required"], *(["payload"] if needed else [])]
        return dict(base) | {"properties": base["properties"] | own, "required": required}

    def _describe(self, task: str, struct: type[msgspec.Struct]) -> str:
        """Add the arguments of a task and all types in them; returns the reference to the arguments."""
        stem = self._stems[task]
        try:
            own, parts = schemas_of(struct)
        except NOT_DESCRIBED:
            # JSON Schema cannot describe the type: accept any object.
            return self._add(f"{stem}Arguments", stem, {"type": "object"})
        refs: dict[str, str] = {}
        for part in parts:
            if part != own:
                name = "_".join(_WORDS.findall(part.rpartition("/")[2]))
                key = name, msgspec.json.encode(sorted(_closure(part, parts).items()))
                refs[part] = REFS.format(name=self._known.setdefault(key, self._free(name, stem)))
                self._used_names.add(self._known[key].lower())
        for part, ref in refs.items():
            name = ref.rpartition("/")[2]
            self.components[name] = _add_title(name, resolve_refs(parts[part], refs))
        return self._add(f"{stem}Arguments", stem, resolve_refs(parts[own], refs))

    def _add(self, name: str, stem: str, schema: Schema) -> str:
        name = self._free(name, stem)
        self._used_names.add(name.lower())
        self.components[name] = schema | {"title": name}
        return REFS.format(name=name)

    def _free(self, name: str, stem: str) -> str:
        candidates = chain((name, f"{stem}{name}"), (f"{stem}{name}_{number}" for number in count(2)))
        return next(each for each in candidates if each.lower() not in self._used_names)


def _stems(tasks: Iterable[str]) -> dict[str, str]:
    """Component name prefix of each task: CamelCase, with a digest where several would be equal."""
    plain = {task: "".join(word[:1].upper() + word[1:] for word in _WORDS.findall(task)) for task in sorted(tasks)}
    counts = Counter(stem.lower() for stem in plain.values())
    return {
        task: stem if stem and stem[0].isalpha() and counts[stem.lower()] == 1 else f"Task{stem}_{_digest(task)}"
        for task, stem in plain.items()
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _closure(part: str, parts: Mapping[str, Schema]) -> dict[str, Schema]:
    """A schema and everything it refers to, directly or indirectly."""
    found: dict[str, Schema] = {}
    waiting = [part]
    while waiting:
        # A default value may contain what resembles a reference.
        if (ref := waiting.pop()) not in found and ref in parts:
            found[ref] = parts[ref]
            waiting += references(parts[ref])
    return found


def references(schema: Any) -> Iterator[str]:
    """Yield the targets of all references in a schema."""
    match schema:
        case {"$ref": str(ref)}:
            yield ref
        case Mapping():
            for value in schema.values():
                yield from references(value)
        case list() | tuple():
            for value in schema:
                yield from references(value)


def _add_title(name: str, schema: Schema) -> Schema:
    return schema | {"title": name} if "title" in schema else schema
