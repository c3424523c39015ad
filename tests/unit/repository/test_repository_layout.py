import ast
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICES = ["gateway", "preprocess", "router", "postprocess", "worker"]

# A worker may run what comes before and after it, because some engines do that themselves.
MAY_IMPORT = {"worker": {"preprocess", "postprocess"}}

# The edges: where a servicer is registered and where messages become plain data. Everything else is plain Python
# that a unit test calls directly.
KNOWS_GRPC = [
    "common/*",
    "*/__main__.py",
    "*/service.py",
    "gateway/clients/*",
    "gateway/fleet.py",
    "postprocess/wire.py",
    "router/*messages.py",
    "router/preprocess.py",
    "worker/attach.py",
    "worker/conformance/*",
    "worker/engines/vllm_grpc/*",
    "worker/hosting.py",
    "worker/registration.py",
    "worker/wire.py",
]


def modules(service: str) -> Iterator[Path]:
    yield from sorted((ROOT / "services" / service).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of everything `path` imports, relative imports resolved."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_folder_shows_where_to_start(service: str) -> None:
    wanted = {"__init__.py", "__main__.py", "settings.py"} | (set() if service == "gateway" else {"service.py"})
    assert wanted <= {path.name for path in (ROOT / "services" / service).iterdir()}


@pytest.mark.parametrize("service", [*SERVICES, "common"])
def test_no_service_imports_another(service: str) -> None:
    foreign = set(SERVICES) - {service} - MAY_IMPORT.get(service, set())
    strangers = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(service)
        for name in imports(path)
        if name.startswith("services.") and name.split(".")[1] in foreign
    ]
    assert strangers == []


@pytest.mark.parametrize("service", SERVICES)
def test_only_the_edges_of_a_service_know_grpc(service: str) -> None:
    leaks = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(service)
        for name in imports(path)
        if not any(fnmatch(str(path.relative_to(ROOT / "services")), edge) for edge in KNOWS_GRPC)
        if name.split(".")[0] in {"grpc", "grpc_health"} or name.startswith(("sluice.v1", "google.protobuf"))
    ]
    assert leaks == []


def test_every_file_a_service_reads_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = ["*.py", *setuptools["package-data"]["*"]]
    files = [path for top in ("services", "sluice") for path in (ROOT / top).rglob("*") if path.is_file()]
    left_out = [
        str(path.relative_to(ROOT))
        for path in files
        if "__pycache__" not in path.parts and not any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    assert left_out == [], "add a pattern to [tool.setuptools.package-data]"


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for top in ("services", "sluice") for path in (ROOT / top).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []
