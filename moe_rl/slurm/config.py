"""The settings `slurm:`: what a job asks of the cluster, and what a site wants to have its own way."""

import math
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from moe_rl.section import Section
from moe_rl.slurm.times import seconds
from parallel.config import ParallelConfig

_MEMORY = re.compile(r"\d+[KMGT]?")
_EXPORT = re.compile(r"[A-Za-z_]\w*")
_OPTION = re.compile(r"--?[A-Za-z]")


class ArraySection(Section):
    """One job, several runs: every variant (or none) with every seed (or none)."""

    seeds: list[NonNegativeInt] = Field(default=[], description="a run a seed, named run.name-sSEED")
    overrides: list[list[str]] = Field(
        default=[], description="a run a list of key.path=value, named run.name-vNUMBER unless it sets run.name"
    )
    concurrency: PositiveInt | None = Field(default=None, description="runs at once; none: as many as get nodes")

    @property
    def size(self) -> int:
        """Runs; 0: a single one, and no array."""
        return max(1, len(self.seeds)) * max(1, len(self.overrides)) if self.seeds or self.overrides else 0


class SlurmSection(Section):
    """Everything else that sbatch, srun and torchrun know goes into the lists of lines; they come last and therefore win."""

    dir: Path = Field(default=Path("slurm"), description="scripts, their settings and logs go to slurm.dir/run.name")
    command: Literal["train", "sft"] = Field(default="train", description="what the job runs: moe-rl train or moe-rl sft")
    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt = Field(default=0, description="0: a CPU cluster")
    processes_per_node: PositiveInt | None = Field(
        default=None, description="none: one a GPU; without GPUs what run.processes or the layout asks for, over the nodes"
    )
    cpus_per_process: PositiveInt | None = Field(default=None, description="none: 8 with GPUs, else run.threads")
    memory: str | None = Field(default=None, description="a node, such as 200G; 0: all of it; none: the partition's default")
    time: str | None = Field(
        default=None, description="limit, as Slurm writes it: minutes, 12:00:00, 2-00:00:00; none: the partition's default"
    )
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = Field(default=False, description="whole nodes, whatever is asked of them")
    container: str | None = Field(default=None, description="image, through pyxis: a .sqsh file or registry#image:tag")
    mounts: list[str] = Field(default=[], description="SOURCE:TARGET in the container, beside the current directory")
    venv: Path | None = Field(
        default=None, description="virtual environment; none: the one that runs this, in a container its own python"
    )
    modules: list[str] = Field(default=[], description="module load ...")
    exports: dict[str, str] = Field(default={}, description="environment variables, as they are: nothing in them is expanded")
    setup: list[str] = Field(
        default=[], description="lines of shell before the run starts, after all variables of the script are set"
    )
    sbatch: list[str] = Field(default=[], description="further #SBATCH options, such as --mail-type=END")
    srun: list[str] = Field(default=[], description="further arguments of srun")
    torchrun: list[str] = Field(default=[], description="further arguments of torchrun")
    launcher: Literal["torchrun", "srun"] = Field(
        default="torchrun", description="who starts the ranks of a node: torchrun, or srun itself, one task a rank"
    )
    signal_seconds: NonNegativeInt = Field(
        default=300, le=65535, description="before the limit: SIGUSR1, on which a run saves and ends; 0: none"
    )
    requeue: bool = Field(default=True, description="queue the job again after such a save, or when a node is lost")
    array: ArraySection = ArraySection()

    @field_validator("time", "memory", mode="before")
    @classmethod
    def _number_as_text(cls, value: object) -> object:
        """`time: 30` and `memory: 0` are numbers in YAML."""
        return _as_text(value)

    @field_validator("exports", mode="before")
    @classmethod
    def _exports_as_text(cls, value: object) -> object:
        return {key: _as_text(one) for key, one in value.items()} if isinstance(value, dict) else value

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str | None) -> str | None:
        if value is not None:
            seconds(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise ValueError(f"slurm.memory={self.memory}: must be a whole number with K, M, G or T, such as 200G")
        for name in self.exports:
            if not _EXPORT.fullmatch(name):
                raise ValueError(f"slurm.exports.{name}: is no name of an environment variable (letters, digits, _)")
        for line in self.sbatch:
            if not _OPTION.match(line.removeprefix("#SBATCH").strip()) or "\n" in line:
                raise ValueError(f"slurm.sbatch: {line!r} is no option of sbatch; write it as --mail-type=END")
        for key in ("account", "partition", "qos", "constraint", "reservation"):
            if (value := getattr(self, key)) is not None and (not value or re.search(r"\s", value)):
                raise ValueError(f"slurm.{key}={value!r}: must not be empty or hold blanks")
        if self.gpus_per_node and (self.processes_per_node or 1) > self.gpus_per_node:
            raise ValueError(
                f"slurm.processes_per_node={self.processes_per_node}: must be at most slurm.gpus_per_node="
                f"{self.gpus_per_node}; every process has a GPU of its own"
            )
        if self.mounts and self.container is None:
            raise ValueError(f"slurm.mounts={self.mounts}: needs slurm.container; without one, paths are the nodes' own")
        if self.launcher == "srun" and self.torchrun:
            raise ValueError(f"slurm.torchrun={self.torchrun}: needs slurm.launcher=torchrun")
        return self

    def per_node(self, parallel: ParallelConfig, processes: int | None) -> int:
        """Processes a node. processes: those that the run asks for, if it does."""
        if self.processes_per_node is not None:
            return self.processes_per_node
        return self.gpus_per_node or math.ceil((processes or parallel.fewest_processes) / self.nodes)


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
