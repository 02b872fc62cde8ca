"""The rules of the house, read from the source: who may import whom, and how long a file or function may be."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "model", "infra")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# A package may import itself and these of the house; it must not import those from outside.
MAY_IMPORT = {"flows": {"tasks", "model", "infra"}, "tasks": {"model", "infra"}, "model": set(), "infra": set()}
MUST_NOT_IMPORT = {
    "flows": {"torch", "boto3", "botocore"},
    "tasks": {"boto3", "botocore"},
    "model": {"prefect", "boto3", "botocore"},
    "infra": {"torch", "prefect"},
}


def imported_modules(source: str) -> set[str]:
    """The full names of all modules that a source file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return names


def faults(package: str, source: str) -> set[str]:
    """The top-level modules that a file of `package` imports against the rules."""
    tops = {name.split(".")[0] for name in imported_modules(source)}
    others = set(PACKAGES) - MAY_IMPORT[package] - {package}
    return tops & (others | MUST_NOT_IMPORT[package])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_layers(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert not faults(package, path.read_text(encoding="utf-8"))


def test_the_check_finds_a_fault() -> None:
    assert faults("model", "def f():\n    from infra.storage import find\n") == {"infra"}
    assert faults("infra", "import torch.nn as nn") == {"torch"}
    assert faults("flows", "import tasks.train\nimport boto3") == {"boto3"}


def test_the_worker_imports_no_prefect() -> None:
    """Transitively: everything that tasks/worker.py reaches within the house."""
    reached, pending = set(), {"tasks.worker"}
    while pending:
        name = pending.pop()
        reached.add(name)
        path = ROOT / Path(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.exists():
            imports = imported_modules(path.read_text(encoding="utf-8"))
            pending |= {name for name in imports if name.split(".")[0] in PACKAGES} - reached
            reached |= imports
    assert "model.trainer" in reached
    assert not {name for name in reached if name.split(".")[0] == "prefect"}


def test_planning_stands_above_the_trainer() -> None:
    for path in (ROOT / "model").glob("*.py"):
        assert not {n for n in imported_modules(path.read_text(encoding="utf-8")) if n.startswith("model.planning")}


def test_flows_only_compose() -> None:
    """No task, class or state is defined in the files that Prefect loads by path."""
    for path in (ROOT / "flows").glob("*.py"):
        if path.name in ("__main__.py", "command_line.py", "console.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], path
        assert "task" not in {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}, path


def test_no_flow_is_named_like_a_module_of_somebody_else() -> None:
    """flows/ lands at the head of sys.path when Prefect loads a flow by path."""
    others = set(sys.stdlib_module_names) | {"evaluate", "tokenize", "datasets", "prefect", "torch", "rich", "yaml"}
    assert not {path.stem for path in (ROOT / "flows").iterdir()} & others


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 50]
