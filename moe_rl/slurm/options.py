"""The arguments of `moe-rl slurm`. Imports nothing heavy: `moe-rl --help` reads it."""

import argparse

DOES = "a Slurm job script of a run, checked first"
EXAMPLES = """\
examples:
  moe-rl slurm configs/slurm.yaml --dry-run                         shows the script and what was noticed
  moe-rl slurm configs/slurm.yaml                                   writes slurm/NAME/job_001.sh and job_001.yaml
  moe-rl slurm configs/slurm.yaml --submit                          and submits it
  moe-rl slurm run.yaml slurm.nodes=4 slurm.gpus_per_node=8 slurm.partition=h100 slurm.time=12:00:00 --submit
  moe-rl slurm run.yaml slurm.array.seeds=[0,1,2,3] slurm.array.concurrency=2 --submit      (one run a seed)
  moe-rl slurm run.yaml 'slurm.array.overrides=[[algorithm.name=grpo],[algorithm.name=gspo]]' --submit

The settings are those of `slurm:` (docs/settings.md); docs/slurm.md starts from nothing."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="settings above the file's, by dotted key"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--submit", action="store_true", help="submit it with sbatch")
    either.add_argument("--dry-run", action="store_true", help="print it and write nothing")
