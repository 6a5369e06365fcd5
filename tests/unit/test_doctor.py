"""`moe-rl doctor`, each time in a process of its own: it looks at what can be imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def doctor(*first_on_path: Path, **env: str) -> tuple[int, dict[str, str], str]:
    """Exit code, the findings by name, the whole output."""
    path = os.pathsep.join(map(str, [*first_on_path, ROOT]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "moe_rl.cli", "doctor"],
        env=os.environ | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    findings = {line[4:24].strip(): line[25:].strip() for line in done.stdout.splitlines() if line[4:5].strip()}
    return done.returncode, findings, done.stdout


def package(folder: Path, *names: str, body: str = "") -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(body)
    return folder


def test_this_machine_can_run(tmp_path: Path) -> None:
    code, findings, text = doctor(WANDB_API_KEY="", NETRC=str(tmp_path / "none"))
    assert code == 0
    assert findings["python"] == ".".join(map(str, sys.version_info[:3]))
    assert findings["megatron-core"].startswith("0.19.")
    assert findings["gloo"] == "works"
    assert findings["backend"] in ("gloo", "nccl")
    assert "writes offline" in findings["wandb"]
    assert text.endswith("nothing is wrong: moe-rl can run here\n")


def test_the_other_apex_is_found_without_running_it(tmp_path: Path) -> None:
    package(tmp_path, "apex", body="raise RuntimeError('was imported')")
    (tmp_path / "apex-0.9.10.dist-info").mkdir()
    (tmp_path / "apex-0.9.10.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    code, findings, text = doctor(tmp_path)
    assert code == 1
    assert findings["apex"].startswith("the unrelated package of that name (0.9.10)")
    assert "pip uninstall apex" in text
    assert "git clone https://github.com/NVIDIA/apex" in text
    assert "Apex's fused Adam" not in findings["optimizer"]
    assert text.endswith("wrong: apex\n")


def test_a_single_module_named_apex_is_the_other_one_too(tmp_path: Path) -> None:
    (tmp_path / "apex.py").write_text("")
    code, findings, _ = doctor(tmp_path)
    assert code == 1
    assert findings["apex"].startswith("the unrelated package")


def test_nvidias_apex_is_used(tmp_path: Path) -> None:
    package(tmp_path, "apex", "apex/optimizers", "apex/normalization")
    code, findings, _ = doctor(tmp_path)
    assert code == 0
    assert findings["apex"] == "NVIDIA's"
    assert findings["optimizer"] == "Apex's fused Adam"
