"""scripts/setup.sh on a project without dependencies, so that nothing is downloaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "empty"
version = "1.0"
[project.optional-dependencies]
dev = []
"""

BACKEND = """\
import pathlib, zipfile
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    if pathlib.Path("broken").exists():
        raise SystemExit("the disk is full")
    info = "empty-1.0.dist-info"
    files = {
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: empty\\nVersion: 1.0\\nProvides-Extra: dev\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "empty.pth": "",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(pathlib.Path(wheel_directory, "empty-1.0-py3-none-any.whl"), "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return "empty-1.0-py3-none-any.whl"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a project"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    return folder


def setup(project: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": path or f"{Path(sys.base_prefix, 'bin')}:{os.environ['PATH']}"}
    script = str(project / "scripts" / "setup.sh")
    return subprocess.run(["bash", script, *arguments], cwd="/", env=env, capture_output=True, text=True, timeout=200)


def installed(project: Path) -> bool:
    find = "import importlib.metadata as m; m.version('empty')"
    return subprocess.run([project / ".venv/bin/python", "-c", find], capture_output=True).returncode == 0


def test_a_failing_shim_is_passed_over_and_a_second_run_does_nothing(project: Path) -> None:
    shims = project / "shims"
    shims.mkdir()
    for name, body in {"python3.12": "exit 127", "python3.13": f'exec "{sys._base_executable}" "$@"'}.items():  # pyright: ignore
        (shims / name).write_text(f"#!/bin/sh\n{body}\n")
        (shims / name).chmod(0o755)
    done = setup(project, path=f"{shims}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"setup: making .venv with Python {sys.version.split()[0]}\nsetup: installing;")
    assert installed(project)

    before = (project / ".venv" / ".moe-rl-base").stat().st_mtime_ns
    again = setup(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert (project / ".venv" / ".moe-rl-base").stat().st_mtime_ns == before

    assert "with extras dev" in setup(project, "dev").stdout
    assert setup(project, "dev").stdout == ""
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "setup: installing" in setup(project, "dev").stdout


def test_an_install_that_failed_is_taken_up_again(project: Path) -> None:
    (project / "broken").touch()
    failed = setup(project)
    assert failed.returncode == 1
    assert "the disk is full" in failed.stderr
    assert failed.stderr.endswith("setup: pip failed; its whole output is in .venv/install.log\n")
    assert not installed(project)
    (project / "broken").unlink()
    done = setup(project)
    assert done.returncode == 0 and done.stdout.startswith("setup: installing")
    assert installed(project)

    (project / ".venv" / "bin" / "python").unlink()  # a .venv cut short
    assert "setup: making .venv" in setup(project).stdout
    assert installed(project)
