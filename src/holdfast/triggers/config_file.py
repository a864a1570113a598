"""Read triggers from a YAML file: one, or a list under `triggers:` (T3).

All errors are reported at once, each with its path. `${NAME}` is replaced by the environment variable, `${NAME:-text}`
by the text if it is not set or empty, and `$${` stands for `${`. Secrets must come from the environment, so that a file
can be shared. No error message contains the value of a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from holdfast.brokers.factory import connection_model
from holdfast.environment import mark_read
from holdfast.errors import InvalidOption
from holdfast.triggers.config import AdapterConfig, TriggerEntry

_VARIABLE: Final = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-(?P<text>[^}]*))?\}|\$\{")
_ONE_VARIABLE: Final = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
#: A URL with a password.
_PASSWORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/@:\s]*:(?P<password>[^@\s]*)@")
#: Worded so that redaction finds nothing that looks like the value of a secret.
_SECRET: Final = "must not be in a file; write ${NAME} and set the variable NAME"
_MASK: Final = "***"
#: Optional key around a single trigger.
_SINGLE: Final = "queue_trigger"
_MANY: Final = "triggers"
#: Maximum nesting of a document; a trigger needs five levels.
_DEPTH: Final = 50
_MAX_TRIGGERS: Final = 1_000

#: Path from the top of the document to a value.
Location = tuple[str | int, ...]


class ConfigMistake(NamedTuple):
    """An error and its path, for example `triggers[1].adapter.connection.port`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidTriggers(InvalidOption):
    """A trigger file with errors."""

    def __init__(self, source: str, mistakes: Sequence[ConfigMistake]) -> None:
        count = "an error" if len(mistakes) == 1 else f"{len(mistakes)} errors"
        super().__init__(f"{source} has {count}: {'; '.join(map(str, mistakes))}")
        self.mistakes = tuple(mistakes)


def load_file(path: str | Path, environment: Mapping[str, str] | None = None) -> list[TriggerEntry]:
    """Read the triggers of a file. Raises `InvalidTriggers` with all errors."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidTriggers(str(path), [ConfigMistake("", f"file not found in {Path.cwd()}")]) from None
    except OSError as exc:
        raise InvalidTriggers(str(path), [ConfigMistake("", f"cannot be read: {exc.strerror or exc}")]) from None
    except UnicodeDecodeError:
        raise InvalidTriggers(str(path), [ConfigMistake("", "is not UTF-8 text")]) from None
    return load_text(text, str(path), environment)


def load_text(text: str, source: str = "triggers", environment: Mapping[str, str] | None = None) -> list[TriggerEntry]:
    """Read the triggers of a YAML text. `source` names it in errors."""
    reading = _ConfigReader(os.environ if environment is None else environment)
    entries = reading.entries(_parse(text, source))
    if reading.mistakes:
        raise InvalidTriggers(source, reading.mistakes)
    return entries


class _ConfigReader:
    """One pass over a document that collects all errors."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.mistakes: list[ConfigMistake] = []
        #: Values of secrets, masked in messages.
        self._secrets: set[str] = set()

    def entries(self, document: Any) -> list[TriggerEntry]:
        entries: list[TriggerEntry] = []
        names: dict[str, str] = {}
        for location, raw in self._entries(document):
            entry = self._entry(location, raw)
            if entry is None:
                continue
            entries.append(entry)
            first = names.setdefault(entry.name, _path(location))
            if first != _path(location):
                self._add((*location, "name"), f"name {entry.name!r} is already used by {first}; rename one")
        return entries

    def _entries(self, document: Any) -> Iterator[tuple[Location, Any]]:
        if not isinstance(document, dict):
            self._add((), f"must be one trigger, or a list under {_MANY}:")
        elif _MANY not in document:
            yield ((_SINGLE,), document[_SINGLE]) if set(document) == {_SINGLE} else ((), document)
        else:
            for key in set(document) - {_MANY}:
                self._add((key,), f"unknown key next to {_MANY}:")
            many = document[_MANY]
            if not isinstance(many, list) or not 0 < len(many) <= _MAX_TRIGGERS:
                self._add((_MANY,), "must be a list with at least one trigger")
                return
            for index, raw in enumerate(many):
                yield (_MANY, index), raw

    def _entry(self, location: Location, raw: Any) -> TriggerEntry | None:
        if not isinstance(raw, dict):
            self._add(location, "must be a trigger: queue_name, consumer_group, adapter, runtime …")
            return None
        before = len(self.mistakes)
        value = self._expand(location, raw)
        self._check_secrets(location, raw, value, TriggerEntry)
        try:
            entry = TriggerEntry.model_validate(value)
        except ValidationError as exc:
            reported = {mistake.path for mistake in self.mistakes}
            for error in exc.errors(include_url=False, include_input=False):
                where = (*location, *error["loc"])
                if _path(where) not in reported:
                    self._add(where, _message(error, value))
            return None
        return entry if len(self.mistakes) == before else None

    def _expand(self, location: Location, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._expand((*location, key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._expand((*location, index), inner) for index, inner in enumerate(value)]
        return self._expand_text(location, value) if isinstance(value, str) else value

    def _expand_text(self, location: Location, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match["name"]
            if match[0] == "$${":
                return "${"
            if name is None:
                self._add(location, "${ starts a variable; write ${NAME} or ${NAME:-text}, or $${ for a literal ${")
                return ""
            mark_read(name)
            value = self._environment.get(name)
            if match["default"] is not None:
                return value or match["text"]
            if value is None:
                self._add(location, f"variable {name} is not set; set it, or write ${{{name}:-text}}")
            return value or ""

        return _VARIABLE.sub(replace, text)

    def _check_secrets(self, location: Location, raw: Any, value: Any, model: type[BaseModel]) -> None:
        """Refuse secrets written in the file; collect the values of the others for masking."""
        for name, inner in raw.items():
            where, field = (*location, name), model.model_fields.get(name)
            kinds = list(_kinds(field.annotation)) if field is not None else []
            if model is AdapterConfig and name == "connection":
                kinds = [_connection_model(raw)]
            nested = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
            if nested is not None and isinstance(inner, dict):
                self._check_secrets(where, inner, value[name], nested)
            elif SecretStr in kinds and inner is not None:
                self._check_secret(where, inner)
                self._secrets.add(str(value[name]))
            elif isinstance(inner, str) and not _has_no_literal_password(inner):
                self._secrets.add(inner)
                self._add(where, f"the password in it {_SECRET}")

    def _check_secret(self, where: Location, raw: Any) -> None:
        if isinstance(raw, str) and "://" in raw:
            # A URL that may contain a password.
            if not _has_no_literal_password(raw):
                self._add(where, f"the password in it {_SECRET}")
        elif not isinstance(raw, str) or not _ONE_VARIABLE.fullmatch(raw):
            self._add(where, _SECRET)

    def _add(self, location: Location, message: str) -> None:
        for secret in self._secrets - {""}:
            message = message.replace(secret, _MASK)
        self.mistakes.append(ConfigMistake(_path(location), message))


# Reading YAML ------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys: YAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> Any:
    try:
        _check_depth(text)
        # A safe loader: it creates plain values only.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidTriggers(source, [ConfigMistake(where, f"is not valid YAML: {exc.problem}")]) from None
    except (yaml.YAMLError, ValueError) as exc:
        raise InvalidTriggers(source, [ConfigMistake("", f"is not valid YAML: {' '.join(str(exc).split())}")]) from None


def _check_depth(text: str) -> None:
    """Check the nesting by events, because the loader recurses with every level."""
    around: list[str | None] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        if len(around) > _DEPTH or (isinstance(event, yaml.AliasEvent) and event.anchor in around):
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)


# Error messages ----------------------------------------------------------------------------------------


def _path(location: Location) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _message(error: Any, value: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return f"unknown key{_suggestion(error['loc'], value)}"
    return str(error["msg"]).removeprefix("Value error, ")


def _suggestion(location: Location, value: Mapping[str, Any]) -> str:
    """A similar key, or all keys."""
    fields = _model_at(location[:-1], value).model_fields
    close = get_close_matches(str(location[-1]), fields, n=1)
    return f"; did you mean {close[0]}?" if close else f"; use one of {', '.join(fields)}"


def _model_at(location: Location, value: Any) -> type[BaseModel]:
    model: type[BaseModel] = TriggerEntry
    for step in location:
        if model is AdapterConfig and step == "connection":
            model = _connection_model(value)
        elif isinstance(step, str) and step in model.model_fields:
            kinds = _kinds(model.model_fields[step].annotation)
            model = next((kind for kind in kinds if issubclass(kind, BaseModel)), model)
        value = value[step] if isinstance(value, dict) and step in value else {}
    return model


def _connection_model(adapter: Mapping[str, Any]) -> type[BaseModel]:
    """The connection model of the adapter's type; a model without fields if the type is unknown."""
    try:
        return connection_model(str(adapter.get("type")))
    except InvalidOption:
        return BaseModel


def _kinds(annotation: Any) -> Iterator[type]:
    """All classes in an annotation, for example both of `SecretStr | None`."""
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _has_no_literal_password(text: str) -> bool:
    """Whether a URL has no password, or one that is a single variable."""
    found = _PASSWORD.search(text)
    return found is None or not found["password"] or _ONE_VARIABLE.fullmatch(found["password"]) is not None
