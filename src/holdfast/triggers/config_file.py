"""Triggers from a YAML file: one, or many under `triggers:` (requirement T3).

All mistakes are told at once, each with its path. `${NAME}` is replaced by the environment's value, `${NAME:-text}` by
the text if there is none, and `$${` stands for `${`. Secrets come from the environment alone, so that a file can be
shown to anybody; no message holds the value of one.
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
#: An address with a password in it.
_PASSWORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/@:\s]*:(?P<password>[^@\s]*)@")
#: Worded so that nothing in it looks like the value of a secret.
_SECRET: Final = "must not stand in a file; write ${NAME} and set the variable NAME"
_BLOT: Final = "***"
#: One trigger may stand under this name.
_SINGLE: Final = "queue_trigger"
_MANY: Final = "triggers"
#: Levels of a document; a trigger needs five.
_DEPTH: Final = 50
_MOST_TRIGGERS: Final = 1_000

#: Steps from the top of the document to a value.
Place = tuple[str | int, ...]


class ConfigMistake(NamedTuple):
    """What is wrong, and where: `triggers[1].adapter.connection.port`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidTriggers(InvalidOption):
    """A file of triggers that cannot be used."""

    def __init__(self, source: str, mistakes: Sequence[ConfigMistake]) -> None:
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{source} has {count}: {'; '.join(map(str, mistakes))}")
        self.mistakes = tuple(mistakes)


def load_file(path: str | Path, environment: Mapping[str, str] | None = None) -> list[TriggerEntry]:
    """The triggers of a file. Raises `InvalidTriggers` with all that is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidTriggers(str(path), [ConfigMistake("", f"there is no such file in {Path.cwd()}")]) from None
    except OSError as exc:
        raise InvalidTriggers(str(path), [ConfigMistake("", f"cannot be read: {exc.strerror or exc}")]) from None
    except UnicodeDecodeError:
        raise InvalidTriggers(str(path), [ConfigMistake("", "is no text in UTF-8")]) from None
    return load_text(text, str(path), environment)


def load_text(text: str, source: str = "triggers", environment: Mapping[str, str] | None = None) -> list[TriggerEntry]:
    """The triggers of a YAML text; `source` names it in errors."""
    reading = _ConfigReader(os.environ if environment is None else environment)
    entries = reading.entries(_parse(text, source))
    if reading.mistakes:
        raise InvalidTriggers(source, reading.mistakes)
    return entries


class _ConfigReader:
    """One pass over a document, collecting mistakes as it goes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.mistakes: list[ConfigMistake] = []
        #: Values of secrets, to be kept out of messages.
        self._secrets: set[str] = set()

    def entries(self, document: Any) -> list[TriggerEntry]:
        entries: list[TriggerEntry] = []
        names: dict[str, str] = {}
        for place, raw in self._entries(document):
            entry = self._entry(place, raw)
            if entry is None:
                continue
            entries.append(entry)
            first = names.setdefault(entry.name, _path(place))
            if first != _path(place):
                self._add((*place, "name"), f"the name {entry.name!r} is taken by {first}; give one of them another")
        return entries

    def _entries(self, document: Any) -> Iterator[tuple[Place, Any]]:
        if not isinstance(document, dict):
            self._add((), f"write one trigger, or many as a list under {_MANY}:")
        elif _MANY not in document:
            yield ((_SINGLE,), document[_SINGLE]) if set(document) == {_SINGLE} else ((), document)
        else:
            for key in set(document) - {_MANY}:
                self._add((key,), f"unknown key beside {_MANY}:")
            many = document[_MANY]
            if not isinstance(many, list) or not 0 < len(many) <= _MOST_TRIGGERS:
                self._add((_MANY,), "write a list with one trigger or more")
                return
            for index, raw in enumerate(many):
                yield (_MANY, index), raw

    def _entry(self, place: Place, raw: Any) -> TriggerEntry | None:
        if not isinstance(raw, dict):
            self._add(place, "write a trigger: queue_name, consumer_group, adapter, runtime …")
            return None
        before = len(self.mistakes)
        value = self._expand(place, raw)
        self._check_secrets(place, raw, value, TriggerEntry)
        try:
            entry = TriggerEntry.model_validate(value)
        except ValidationError as exc:
            told = {mistake.path for mistake in self.mistakes}
            for error in exc.errors(include_url=False, include_input=False):
                where = (*place, *error["loc"])
                if _path(where) not in told:
                    self._add(where, _message(error, value))
            return None
        return entry if len(self.mistakes) == before else None

    def _expand(self, place: Place, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._expand((*place, key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._expand((*place, index), inner) for index, inner in enumerate(value)]
        return self._expand_text(place, value) if isinstance(value, str) else value

    def _expand_text(self, place: Place, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match["name"]
            if match[0] == "$${":
                return "${"
            if name is None:
                self._add(place, "${ begins a variable: write ${NAME} or ${NAME:-text}, or $${ for ${ itself")
                return ""
            mark_read(name)
            value = self._environment.get(name)
            if match["default"] is not None:
                return value or match["text"]
            if value is None:
                self._add(place, f"the variable {name} is not set; set it, or write ${{{name}:-text}}")
            return value or ""

        return _VARIABLE.sub(replace, text)

    def _check_secrets(self, place: Place, raw: Any, value: Any, model: type[BaseModel]) -> None:
        """Refuse what is a secret and stands in the file; remember the others."""
        for name, inner in raw.items():
            where, field = (*place, name), model.model_fields.get(name)
            kinds = list(_kinds(field.annotation)) if field is not None else []
            if model is AdapterConfig and name == "connection":
                kinds = [_connection_model(raw)]
            nested = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
            if nested is not None and isinstance(inner, dict):
                self._check_secrets(where, inner, value[name], nested)
            elif SecretStr in kinds and inner is not None:
                self._check_secret(where, inner)
                self._secrets.add(str(value[name]))
            elif isinstance(inner, str) and not _password_from_outside(inner):
                self._secrets.add(inner)
                self._add(where, f"the password in it {_SECRET}")

    def _check_secret(self, where: Place, raw: Any) -> None:
        if isinstance(raw, str) and "://" in raw:
            # An address that may hold a password.
            if not _password_from_outside(raw):
                self._add(where, f"the password in it {_SECRET}")
        elif not isinstance(raw, str) or not _ONE_VARIABLE.fullmatch(raw):
            self._add(where, _SECRET)

    def _add(self, place: Place, message: str) -> None:
        for secret in self._secrets - {""}:
            message = message.replace(secret, _BLOT)
        self.mistakes.append(ConfigMistake(_path(place), message))


# Reading YAML ------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would silently take the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> Any:
    try:
        _check_depth(text)
        # A safe loader: it makes plain values only.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidTriggers(source, [ConfigMistake(where, f"is no YAML: {exc.problem}")]) from None
    except (yaml.YAMLError, ValueError) as exc:
        raise InvalidTriggers(source, [ConfigMistake("", f"is no YAML: {' '.join(str(exc).split())}")]) from None


def _check_depth(text: str) -> None:
    """By events, which come one after the other: a loader goes down with every level."""
    around: list[str | None] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        if len(around) > _DEPTH or (isinstance(event, yaml.AliasEvent) and event.anchor in around):
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=event.start_mark)


# Saying what is wrong ----------------------------------------------------------------------------------


def _path(place: Place) -> str:
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _message(error: Any, value: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return f"unknown key{_suggestion(error['loc'], value)}"
    return str(error["msg"]).removeprefix("Value error, ")


def _suggestion(place: Place, value: Mapping[str, Any]) -> str:
    """What was meant, perhaps; else what there is."""
    fields = _model_at(place[:-1], value).model_fields
    close = get_close_matches(str(place[-1]), fields, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(fields)}"


def _model_at(place: Place, value: Any) -> type[BaseModel]:
    model: type[BaseModel] = TriggerEntry
    for step in place:
        if model is AdapterConfig and step == "connection":
            model = _connection_model(value)
        elif isinstance(step, str) and step in model.model_fields:
            kinds = _kinds(model.model_fields[step].annotation)
            model = next((kind for kind in kinds if issubclass(kind, BaseModel)), model)
        value = value[step] if isinstance(value, dict) and step in value else {}
    return model


def _connection_model(adapter: Mapping[str, Any]) -> type[BaseModel]:
    """Of the adapter's type; without a known one, a model without fields."""
    try:
        return connection_model(str(adapter.get("type")))
    except InvalidOption:
        return BaseModel


def _kinds(annotation: Any) -> Iterator[type]:
    """The classes in an annotation: of `SecretStr | None`, both."""
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _password_from_outside(text: str) -> bool:
    """Whether no password stands in an address: there is none, or it is one variable."""
    found = _PASSWORD.search(text)
    return found is None or not found["password"] or _ONE_VARIABLE.fullmatch(found["password"]) is not None
