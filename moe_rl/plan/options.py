"""The options of `moe-rl plan`: imported with the command line, so it imports nothing heavy."""

import argparse
from collections.abc import Callable

from moe_rl.plan.cluster import GIB, Cluster

EXAMPLES = """\
examples:
  moe-rl plan configs/large/qwen3_30b_a3b_gspo.yaml --nodes 4 --gpus-per-node 8
  moe-rl plan run.yaml --nodes 2 --gpus-per-node 8 --gpu-memory 141 --top 30
  moe-rl plan run.yaml --nodes 32 --gpus-per-node 8 model.preset=deepseek_v3 model.recompute=full
exit code: 0 where a layout fits, 1 where none does. How the figures are made: docs/planning.md"""


def add(command: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """positive: reads an integer of at least 1."""
    assumed = Cluster(1, 1)
    command.add_argument("config", metavar="CONFIG", help="YAML file")
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="settings above the file's")
    command.add_argument("--nodes", metavar="N", type=positive, required=True)
    command.add_argument("--gpus-per-node", metavar="G", type=positive, required=True)
    for name, default, says in (
        ("--gpu-memory", assumed.memory / GIB, "of one GPU"),
        ("--overhead", assumed.overhead / GIB, "a GPU for CUDA, NCCL and what the allocator cannot use"),
    ):
        command.add_argument(name, metavar="GiB", type=_amount, default=default, help=f"{says} (default {default:g})")
    command.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=positive,
        default=assumed.prompt_tokens,
        help=f"longest prompt (default {assumed.prompt_tokens}, or what model.max_positions leaves)",
    )
    command.add_argument(
        "--imbalance",
        metavar="X",
        type=_at_least_1,
        default=assumed.imbalance,
        help=f"tokens of the busiest experts' rank, over the mean (default {assumed.imbalance:g})",
    )
    command.add_argument("--top", metavar="N", type=positive, default=10, help="layouts that are shown (default 10)")
    command.add_argument("--all", action="store_true", help="show every layout")
    command.add_argument("--json", metavar="FILE", help="write all layouts there, in bytes and seconds")


def cluster(arguments: argparse.Namespace) -> Cluster:
    return Cluster(
        nodes=arguments.nodes,
        gpus=arguments.gpus_per_node,
        memory=arguments.gpu_memory * GIB,
        overhead=arguments.overhead * GIB,
        imbalance=arguments.imbalance,
        prompt_tokens=arguments.prompt_tokens,
    )


def _amount(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return value


def _at_least_1(text: str) -> float:
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of at least 1 (1: all ranks get equally many)")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
