"""Triggers from a file: all errors are reported at once by path, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, SecretStr

from holdfast.errors import InvalidOption
from holdfast.triggers import config, config_file
from holdfast.triggers.config_file import InvalidTriggers, load_file, load_text

ONE = """
queue_name: orders
consumer_group: shop
adapter: {type: memory}
runtime: {task: ship}
"""
SECRET = "hunter2-is-not-here"


class Tls(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ca_file: str | None = None
    key_password: SecretStr | None = None


class Connection(BaseModel):
    """A broker with settings of every kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = 9092
    password: SecretStr | None = None
    url: SecretStr | None = None
    plain_url: str = ""
    tls: Tls | None = None


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection_model(name: str) -> type[BaseModel]:
        if name != "test":
            raise InvalidOption(f"unknown broker type {name!r}")
        return Connection

    monkeypatch.setattr(config, "connection_model", connection_model)
    monkeypatch.setattr(config_file, "connection_model", connection_model)


def load_errors(text: str, **environment: str) -> dict[str, str]:
    with pytest.raises(InvalidTriggers) as caught:
        load_text(text, "triggers.yaml", environment)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.mistakes)
    assert all(str(error) in str(caught.value) for error in caught.value.mistakes)
    errors = dict(caught.value.mistakes)
    assert len(errors) == len(caught.value.mistakes), "one error per path"
    return errors


def with_connection(**connection: Any) -> str:
    return yaml.safe_dump(yaml.safe_load(ONE) | {"adapter": {"type": "test", "connection": connection}})


def load_connection(text: str, **environment: str) -> Connection:
    (entry,) = load_text(text, environment=environment)
    connection = entry.adapter.connection
    assert isinstance(connection, Connection)
    return connection


# Shapes --------------------------------------------------------------------------------------------


def test_one_trigger_or_many(tmp_path: Path) -> None:
    (entry,) = load_text(ONE, environment={})
    assert (entry.name, entry.adapter.type, entry.runtime.task) == ("orders", "memory", "ship")
    assert load_text(yaml.safe_dump({"queue_trigger": yaml.safe_load(ONE)}), environment={}) == [entry]
    other = yaml.safe_load(ONE) | {"name": "others"}
    path = tmp_path / "triggers.yaml"
    path.write_text(yaml.safe_dump({"triggers": [yaml.safe_load(ONE), other]}))
    assert [each.name for each in load_file(path, {})] == ["orders", "others"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ""),
        ("just words", ""),
        ("- queue_name: a", ""),
        ("triggers: []", "triggers"),
        ("triggers: {a: 1}", "triggers"),
        ("triggers: [1]", "triggers[0]"),
        ("queue_trigger: 5", "queue_trigger"),
        ("a: [1, 2", "line 1, column 9"),
        ("a: 1\n\tb: 2", "line 2, column 1"),
        ("a: 1\na: 2", "line 2, column 1"),
        ("a: !!python/object:os.system x", "line 1, column 4"),
        ("a: \x01", ""),
        ("&a [*a]", "line 1, column 5"),
    ],
)
def test_invalid_files_are_refused(text: str, path: str) -> None:
    assert set(load_errors(text)) == {path}


def test_deep_nesting_is_refused() -> None:
    for text in (ONE + "focus: " + "[" * 5_000 + "]" * 5_000, "&a {focus: *a}"):
        ((_, message),) = load_errors(text).items()
        assert "nested too deeply" in message


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", ".", "binary.yaml"):
        with pytest.raises(InvalidTriggers, match=name):
            load_file(tmp_path / name)


# Errors --------------------------------------------------------------------------------------------


def test_all_errors_of_all_triggers_are_reported_by_path(broker: None) -> None:
    text = """
triggers:
  - queue_name: a
    consumer_group: ${GROUP}
    concurency: 5
    adapter: {type: test, connection: {port: abc, pasword: "${SECRET}"}}
    runtime: {task: t}
  - consumer_group: g
    ack_policy: maybe
    adapter: {type: pigeon}
    runtime: {task: t, url: "http://127.0.0.1"}
  - queue_name: c
    consumer_group: g
    adapter: {type: test, connection: {password: %s, tls: {key_password: %s, cafile: x}}}
    runtime: {url: "http://127.0.0.1", token: %s}
shared: 1
""" % ((SECRET,) * 3)  # fmt: skip
    errors = load_errors(text, SECRET=SECRET)
    secret = "must not be in a file; write ${NAME} and set the variable NAME"
    assert errors == {
        "shared": "unknown key next to triggers:",
        "triggers[0].consumer_group": "variable GROUP is not set; set it, or write ${GROUP:-text}",
        "triggers[0].concurency": "unknown key; did you mean concurrency?",
        "triggers[0].adapter.connection.port": (
            "Input should be a valid integer, unable to parse string as an integer"
        ),
        "triggers[0].adapter.connection.pasword": "unknown key; did you mean password?",
        "triggers[1].queue_name": "is missing",
        "triggers[1].ack_policy": "Input should be 'ack', 'nack', 'requeue' or 'dlq'",
        "triggers[1].adapter.type": "unknown broker type 'pigeon'",
        "triggers[1].runtime": "set exactly one of task, callable and url, not task and url",
        "triggers[2].adapter.connection.password": secret,
        "triggers[2].adapter.connection.tls.key_password": secret,
        "triggers[2].adapter.connection.tls.cafile": "unknown key; did you mean ca_file?",
        "triggers[2].runtime.token": secret,
    }


def test_an_unknown_key_error_lists_the_valid_keys() -> None:
    errors = load_errors(ONE.replace("{task: ship}", "{task: ship, zzz: 1}"))
    assert errors == {"runtime.zzz": "unknown key; use one of task, callable, url, timeout, token"}


def test_duplicate_names_are_refused() -> None:
    one, two = yaml.safe_load(ONE), yaml.safe_load(ONE) | {"queue_name": "b", "name": "orders"}
    errors = load_errors(yaml.safe_dump({"triggers": [one, two, one]}))
    message = "name 'orders' is already used by triggers[0]; rename one"
    assert errors == {"triggers[1].name": message, "triggers[2].name": message}


# Variables -----------------------------------------------------------------------------------------


def test_variables(broker: None) -> None:
    text = with_connection(host="${HOST:-other}-${N:-0}", port="${PORT}", password="${SECRET}", plain_url="$${HOST}")
    connection = load_connection(text, PORT="1234", SECRET=SECRET, N="")
    assert (connection.host, connection.port, connection.plain_url) == ("other-0", 1234, "${HOST}")
    assert connection.password is not None
    assert connection.password.get_secret_value() == SECRET
    assert SECRET not in repr(load_text(text, environment={"PORT": "1", "SECRET": SECRET}))


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_GROUP", "from-outside")
    (entry,) = load_text(ONE.replace("shop", "${ORDERS_GROUP}"))
    assert entry.consumer_group == "from-outside"


@pytest.mark.parametrize("text", ["${", "${}", "${A B}", "${A:-", "${1A}", "x${A-y}"])
def test_invalid_variables_are_refused(text: str) -> None:
    errors = load_errors(yaml.safe_dump(yaml.safe_load(ONE) | {"focus": text}), A="1")
    assert errors == {"focus": "${ starts a variable; write ${NAME} or ${NAME:-text}, or $${ for a literal ${"}


# Secrets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("literal", [SECRET, f"{SECRET}${{A}}", f"${{A:-{SECRET}}}", "$${A}", 12345, ["x"]])
def test_a_literal_secret_is_refused(broker: None, literal: Any) -> None:
    errors = load_errors(with_connection(password=literal), A="1")
    assert errors == {"adapter.connection.password": config_file._SECRET}


@pytest.mark.parametrize("field", ["url", "plain_url"])
def test_a_literal_password_in_a_url_is_refused(broker: None, field: str) -> None:
    errors = load_errors(with_connection(**{field: f"amqp://ada:{SECRET}@127.0.0.1/"}))
    assert errors == {f"adapter.connection.{field}": f"the password in it {config_file._SECRET}"}
    for valid in ("amqp://127.0.0.1/", "amqp://ada@127.0.0.1/", "amqp://ada:${SECRET}@127.0.0.1/"):
        load_connection(with_connection(**{field: valid}), SECRET=SECRET)


def test_secrets_in_validator_errors_are_redacted(broker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class EchoingConnection(Connection):
        @classmethod
        def model_validate(cls, value: Any, **_: Any) -> Any:  # type: ignore[override]
            raise ValueError(f"this password is wrong: {value['password']}")

    monkeypatch.setattr(config, "connection_model", lambda _: EchoingConnection)
    errors = load_errors(with_connection(password="${SECRET}"), SECRET=SECRET)
    assert errors == {"adapter.connection": "this password is wrong: ***"}
