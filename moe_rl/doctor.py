"""`moe-rl doctor`: what is installed, what will be used, what is wrong and how to mend it."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import psutil

from moe_rl import sinks

Verdict = Literal["ok", "note", "wrong"]

APEX_FROM_SOURCE = (
    "git clone https://github.com/NVIDIA/apex && cd apex && "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
)


@dataclass(frozen=True)
class Finding:
    """One line. verdict "wrong": no run can be trusted before it is mended; `mend` says how."""

    name: str
    value: str
    verdict: Verdict = "ok"
    mend: str = ""


def doctor() -> int:
    """Prints the findings; 0 where a run can start, else 1."""
    findings: list[Finding] = []
    for title, section in (("installed", installed()), ("machine", machine()), ("will be used", used())):
        print(title)
        for finding in section:
            findings.append(finding)
            mark = {"ok": "  ", "note": "- ", "wrong": "X "}[finding.verdict]
            print(f"  {mark}{finding.name:<20} {finding.value}")
            if finding.mend:
                print(f"    {'':<20} -> {finding.mend}")
    wrong = [finding.name for finding in findings if finding.verdict == "wrong"]
    print(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong: moe-rl can run here")
    return 1 if wrong else 0


def installed() -> Iterable[Finding]:
    """Versions of what is required, and of what is optional."""
    recent = sys.version_info >= (3, 12)
    yield Finding("python", platform.python_version(), "ok" if recent else "wrong", "" if recent else "needs 3.12 or newer")
    for name in ("torch", "megatron-core", "transformers", "pydantic"):
        version = _version(name)
        mend = "" if version else "pip install moe-rl (or scripts/setup.sh)"
        yield Finding(name, version or "missing", "ok" if version else "wrong", mend)
    yield _optional(
        "transformer-engine", "pip install 'moe-rl[gpu]' where a GPU and CUDA's compiler are", "torch layers instead"
    )
    yield apex()
    yield _optional("reasoning-gym", "pip install 'moe-rl[tasks]' for task.name=reasoning_gym:NAME")
    yield _optional("math-verify", "pip install 'moe-rl[tasks]' for task.scorer=math_verify")
    yield _optional("tensorboard", "pip install 'moe-rl[tensorboard]' for tracking.tensorboard=true")
    account = "an API key is set" if sinks.wandb_account() else "no API key: tracking.wandb=true writes offline"
    yield Finding("wandb", f"{_version('wandb') or 'missing'}, {account}")


def apex() -> Finding:
    """NVIDIA's Apex, nothing, or PyPI's package of the same name: a web toolkit that Megatron-Core would take for NVIDIA's.

    It is looked at without being imported. Megatron-Core imports `apex`, and where that works uses its fused norm,
    which the other package does not have.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("apex", "not installed; Transformer Engine's or torch's Adam and norms instead")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    parts = ("optimizers", "normalization")
    if all(any((folder / part).is_dir() or (folder / f"{part}.py").is_file() for folder in folders) for part in parts):
        return Finding("apex", f"NVIDIA's {_version('apex') or ''}".rstrip())
    return Finding(
        "apex",
        f"the unrelated package of that name ({_version('apex') or spec.origin}): Megatron-Core would take it for NVIDIA's",
        "wrong",
        f"pip uninstall apex; NVIDIA's is not on PyPI and is built from source: {APEX_FROM_SOURCE}",
    )


def machine() -> Iterable[Finding]:
    """Cores, memory, GPUs, and whether processes can talk to each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("CPU cores", str(cores))
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    if _version("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            yield Finding(f"GPU {number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        yield Finding("CUDA", str(torch.version.cuda))
    else:
        yield Finding("GPU", f"none that torch {torch.__version__} can use")
    yield _gloo()


def _gloo() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "not in this torch", "wrong", "install a torch with distributed support")
    try:
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder, "store").as_uri()
            dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1, timeout=timedelta(seconds=20))
            dist.all_reduce(torch.ones(3))
            dist.destroy_process_group()
    except RuntimeError as error:
        mend = "if a network interface is the trouble, name one: GLOO_SOCKET_IFNAME=lo"
        return Finding("gloo", f"does not start: {str(error).splitlines()[0]}", "wrong", mend)
    return Finding("gloo", "works")


def used() -> Iterable[Finding]:
    """What a run on this machine would choose."""
    if _version("torch") is None:
        return
    import torch

    cuda, engine = torch.cuda.is_available(), importlib.util.find_spec("transformer_engine") is not None
    yield Finding("backend", "nccl" if cuda else "gloo")
    yield Finding("layers", "Transformer Engine's" if engine and cuda else "torch's (scaled dot product attention, RMSNorm)")
    if engine:
        adam = "Transformer Engine's fused Adam"
    elif apex().value.startswith("NVIDIA's"):
        adam = "Apex's fused Adam"
    else:
        adam = "torch's AdamW (Transformer Engine's and Apex's are not installed)"
    yield Finding("optimizer", adam)


def _optional(name: str, how: str, instead: str = "") -> Finding:
    version = _version(name)
    if version:
        return Finding(name, version)
    return Finding(name, "not installed" + (f"; {instead}" if instead else ""), "note", how)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
