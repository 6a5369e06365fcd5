"""What is installed, what it needs, and who may import what."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_rl", "models", "parallel")
PURE = (
    "algorithms",
    "advantages",
    "token_advantages",
    "alignment",
    "corrections",
    "shaping",
    "metrics",
    "batching",
    "estimates",
    "drift/metrics",
    "drift/sums",
    "tasks",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources(*places: str) -> list[Path]:
    """The Python files of packages and modules, by their paths without .py."""
    found = []
    for place in places:
        path = ROOT / place
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return found


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, and what it takes from a module (`from torch import distributed`)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"  # torch.distributed.all_reduce(...)


def importers(module: str, files: list[Path]) -> set[str]:
    inside = f"{module}."
    return {
        str(path.relative_to(ROOT))
        for path in files
        if any(name == module or name.startswith(inside) for name in imported(path))
    }


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    """The names are common words: nothing beside them may slip in, and no module may be left out."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "wandb")
    shutil.copytree(ROOT, copy, ignore=ignored)
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"moe_rl-{PROJECT['project']['version']}.dist-info"}
    code = {name for name in names if name.endswith(".py")}
    assert code == {str(path.relative_to(ROOT)) for path in sources(*PACKAGES)}
    assert entry_points.split() == ["[console_scripts]", "moe-rl", "=", "moe_rl.cli:main"]


def test_requirements_are_bounded_and_never_name_the_other_apex() -> None:
    project = PROJECT["project"]
    required = project["dependencies"]
    optional = [name for extra in project["optional-dependencies"].values() for name in extra]
    assert not [name for name in required + optional if name.replace("_", "-").lower().startswith("apex")]
    assert not [name for name in required if "<" not in name or ">=" not in name]
    megatron = next(name for name in required if name.startswith("megatron-core"))
    assert megatron.endswith("<0.20")


def test_every_third_party_import_is_declared() -> None:
    project = PROJECT["project"]
    declared = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    modules = {name.split("[")[0].split(">")[0].split("=")[0].strip().replace("-", "_") for name in declared}
    modules = modules - {"megatron_core", "pyyaml"} | {"megatron", "yaml"}
    known = modules | set(PACKAGES) | set(sys.stdlib_module_names)
    unknown = {}
    for path in sources(*PACKAGES):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        froms = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        if missing := {name.split(".")[0] for name in plain + froms} - known:
            unknown[str(path.relative_to(ROOT))] = missing
    assert not unknown


def test_pure_modules_do_not_touch_torch_distributed() -> None:
    """import-linter sees torch as a whole, so this looks at the names."""
    files = sources(*(f"moe_rl/{name}" for name in PURE))
    assert files
    assert importers("torch.distributed", files) == set()
    assert importers("megatron", files) == set()


@pytest.mark.parametrize("module", ["moe_rl.drift.scoring", "moe_rl.config", "moe_rl.algorithms.config"])
def test_settings_and_the_watch_with_its_scores_need_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("wandb", {"moe_rl/sinks.py"}),
        ("tensorboard", set()),
        ("torch.utils.tensorboard", {"moe_rl/sinks.py"}),
    ],
)
def test_an_optional_dependency_is_imported_in_one_file(module: str, where: set[str]) -> None:
    assert importers(module, sources(*PACKAGES)) == where


@pytest.mark.parametrize("path", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_strict_and_executable(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
