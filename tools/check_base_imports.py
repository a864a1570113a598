"""Check that the base install loads without the packages of any extra.

Follows the imports that run when a module is loaded: those at its top level, not those inside functions or under
`TYPE_CHECKING`. A module of the base may load packages of the base install; a module that belongs to an extra may also
load that extra's packages. Fails with the chain of imports that leads to any other package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from holdfast.extras import EXTRAS

ROOT: Final = Path(__file__).resolve().parent.parent / "src"

#: Requirements of the base install → their modules.
BASE: Final[Mapping[str, tuple[str, ...]]] = {
    "aiosqlite": ("aiosqlite",),
    "msgspec": ("msgspec",),
    "prometheus-client": ("prometheus_client",),
    "pydantic": ("pydantic", "pydantic_core"),
    "pydantic-settings": ("pydantic_settings",),
    "pyyaml": ("yaml",),
    "rich": ("rich",),
    "sqlalchemy": ("sqlalchemy",),
    "typer": ("typer",),
}
#: Not an extra: modules that are part of a test suite may load its tools.
TESTS: Final = "tests"
PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {**EXTRAS, TESTS: ("hypothesis", "pytest")}

#: Modules, with all below them, that are loaded only with these extras. All others belong to the base.
OWNERS: Final[Mapping[str, tuple[str, ...]]] = {
    "holdfast.verification.acceptance.sandbox_postgres": ("postgres",),
    "holdfast.verification.acceptance.sandbox_redis": ("redis",),
    "holdfast.brokers.kafka": ("kafka",),
    "holdfast.brokers.rabbitmq": ("rabbitmq",),
    "holdfast.brokers.rabbitmq_connection": ("rabbitmq",),
    "holdfast.brokers.rabbitmq_messages": ("rabbitmq",),
    "holdfast.brokers.redis_connection": ("redis",),
    "holdfast.brokers.redis_streams": ("redis",),
    "holdfast.brokers.sqs": ("sqs",),
    "holdfast.brokers.sqs_connection": ("sqs",),
    "holdfast.brokers.sqs_publisher": ("sqs",),
    "holdfast.verification.chaos": ("http", "postgres", "redis"),
    "holdfast.engine.redis": ("redis",),
    "holdfast.http": ("http",),
    "holdfast.ledger.migrations": ("postgres",),
    "holdfast.ledger.postgres": ("postgres",),
    "holdfast.ledger.revisions": ("postgres",),
    "holdfast.mongo": ("mongo",),
    "holdfast.testing.contract": (TESTS,),
    "holdfast.testing.state_machine": (TESTS,),
    "holdfast.testing.operator_rules": (TESTS,),
    "holdfast.webhooks.sender": ("http",),
    "holdfast_pytest": (TESTS,),
}

Graph = Mapping[str, frozenset[str]]


def read_graph(root: Path) -> Graph:
    """Each module below `root` → what it imports when loaded: modules below `root`, and other packages."""
    files = {_name(file.relative_to(root)): file for file in root.rglob("*.py")}
    return {name: frozenset(_imported(file, files)) for name, file in files.items()}


def problems(graph: Graph, owners: Mapping[str, tuple[str, ...]]) -> list[str]:
    """One line, with the chain, for each import of a package that the module must not load."""
    always = {*graph, *sys.stdlib_module_names, *(name for modules in BASE.values() for name in modules)}
    found = [f"{owner}: no such module; remove it from OWNERS" for owner in owners if owner not in graph]
    may_load = {
        module: always | {name.partition(".")[0] for owner in _owners_of(module, owners) for name in PACKAGES[owner]}
        for module in graph
    }
    faults = {
        _culprit(chain, may_load)
        for module in graph
        for package, chain in _chains(graph, module).items()
        if package not in may_load[module]
    }
    for chain in sorted(faults):
        belongs = ", ".join(f"[{owner}]" for owner in _owners_of(chain[0], owners)) or "the base"
        found.append(f"{chain[0]} belongs to {belongs} and must not load {chain[-1]}: {' → '.join(chain)}")
    return found


def _culprit(chain: tuple[str, ...], may_load: Mapping[str, set[str]]) -> tuple[str, ...]:
    """The end of the chain, from the last module that must not load the package; those before it only import it."""
    start = max(i for i, module in enumerate(chain[:-1]) if chain[-1] not in may_load[module])
    return chain[start:]


def _owners_of(module: str, owners: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    while module:
        if module in owners:
            return owners[module]
        module = module.rpartition(".")[0]
    return ()


def _chains(graph: Graph, start: str) -> dict[str, tuple[str, ...]]:
    """Everything that the module loads → the shortest chain of imports to it."""
    chains: dict[str, tuple[str, ...]] = {start: (start,)}
    waiting = [start]
    for module in waiting:
        for imported in sorted(graph.get(module, ())):
            if imported not in chains:
                chains[imported] = (*chains[module], imported)
                waiting.append(imported)
    return chains


def _imported(file: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for statement in _run_at_load(ast.parse(file.read_text()).body):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            if statement.level:
                raise SystemExit(f"{file}: relative imports are not supported; use the absolute name")
            source = statement.module or ""
            names = [source, *(f"{source}.{alias.name}" for alias in statement.names)]
        for name in names:
            if name in modules:
                # A module's packages are loaded before it.
                yield from _with_packages(name)
            else:
                yield name.partition(".")[0]


def _with_packages(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _run_at_load(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for statement in body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                yield statement
            case ast.If(test=test) if ast.unparse(test).endswith("TYPE_CHECKING"):
                yield from _run_at_load(statement.orelse)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case _:
                for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                    for inner in getattr(statement, part, ()):
                        yield from _run_at_load(inner.body if hasattr(inner, "pattern") else [inner])


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> int:
    """Check the source tree."""
    found = problems(read_graph(ROOT), OWNERS)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
