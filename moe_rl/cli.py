"""The command line, `moe-rl`. Nothing heavy is imported until a command runs: `moe-rl --help` must answer at once."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moe_rl import examples
from moe_rl.plan import options as plan_options
from moe_rl.slurm import options as slurm_options
from parallel.errors import UsageError

if TYPE_CHECKING:
    from moe_rl.config import RunConfig


class _Parser(argparse.ArgumentParser):
    """Ends with one line and exit code 2 instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += " (settings are written key.path=value, such as run.steps=20)"
        raise UsageError(f"{message}; see {self.prog} --help")


class _CommandParser(_Parser):
    """Of one command: settings and options in any order."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True  # parse_known_intermixed_args asks this method, for the options and for the rest
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted, 1 anything else."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        parsed = _parse(arguments)
        return parsed.run(parsed)
    except UsageError as error:
        print(f"moe-rl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("moe-rl: stopped by SIGINT", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Takes key=value behind an option too, where argparse expects no positional any more."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in parsed or any("=" not in one or one.startswith("-") for one in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _parser() -> _Parser:
    parser = _Parser(
        prog="moe-rl",
        description="Reinforcement learning of Mixture-of-Experts language models, with instruments for routing drift.",
        epilog="moe-rl COMMAND --help shows examples. docs/settings.md lists every setting.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, does, shown in (
        ("train", "reinforcement learning", examples.TRAIN),
        ("sft", "supervised training (a warm start)", examples.SFT),
        ("eval", "pass@1, pass@k, rewards and lengths of a checkpoint on held-out problems", examples.EVAL),
    ):
        command = _add_command(commands, name, does, shown, _run)
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", default=[], help="settings above the file's, by dotted key"
        )
    command = _add_command(commands, "import", "a Hugging Face directory to a checkpoint", examples.IMPORT, _import)
    command.add_argument("source", metavar="HF_DIR", type=Path, help="with config.json and *.safetensors")
    command.add_argument("target", metavar="CKPT", type=Path, help="directory that is made")
    command = _add_command(commands, "export", "a checkpoint to a Hugging Face directory", examples.EXPORT, _export)
    command.add_argument("source", metavar="CKPT", type=Path, help="a run, its checkpoints/, or a checkpoint")
    command.add_argument("target", metavar="HF_DIR", type=Path, help="directory that is made")
    command.add_argument("--like", metavar="DIR", type=Path, help="whose configuration and tokenizer (default: the origin's)")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="of all tensors (default: as in the checkpoint)")
    command.add_argument("--shard-gb", metavar="GB", type=_positive, default=5, help="size of a file (default 5)")
    slurm_options.add(_add_command(commands, "slurm", slurm_options.DOES, slurm_options.EXAMPLES, _slurm))
    command = _add_command(commands, "drift", "how routing moved: tables from metrics and traces", examples.DRIFT, _drift)
    command.add_argument("runs", metavar="RUN", nargs="+", help="run directory")
    command.add_argument("--last", metavar="N", type=_positive, default=10, help="steps that are averaged (default 10)")
    command = _add_command(commands, "report", "one HTML page of a run, or of several compared", examples.REPORT, _report)
    command.add_argument("runs", metavar="RUN", nargs="+", help="run directory")
    command.add_argument("--output", metavar="FILE", help="where the page goes (default: report.html in the first RUN)")
    does = "legal layouts on a cluster: memory of a GPU, expert placement, estimated cost; needs no GPU"
    plan_options.add(_add_command(commands, "plan", does, plan_options.EXAMPLES, _plan), _positive)
    does = "what is installed, what will be used, what is wrong"
    command = _add_command(commands, "doctor", does, examples.DOCTOR, _doctor)
    command.add_argument("--cluster", action="store_true", help="try every rank and every group of ranks instead")
    command.add_argument("--processes", metavar="N", type=_positive, help="with --cluster: to start here (default: the fewest)")
    command.add_argument("config", metavar="CONFIG", nargs="?", help="with --cluster: YAML file whose layout is tried")
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="settings above the file's")
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[_CommandParser]",
    name: str,
    does: str,
    shown: str,
    run: Callable[[argparse.Namespace], int],
) -> _Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=does, description=does, epilog=shown, formatter_class=formatter)
    command.set_defaults(run=run)
    return command


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import importlib.metadata

        print(f"moe-rl {importlib.metadata.version('moe-rl')}")
        parser.exit()


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not value:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least 1")
    return value


def _import(arguments: argparse.Namespace) -> int:
    from moe_rl.conversion import import_command

    return import_command(arguments.source, arguments.target)


def _export(arguments: argparse.Namespace) -> int:
    from moe_rl.conversion import export_command

    return export_command(arguments.source, arguments.target, arguments.like, arguments.dtype, arguments.shard_gb)


def _slurm(arguments: argparse.Namespace) -> int:
    from moe_rl.slurm.command import slurm

    return slurm(arguments)


def _drift(arguments: argparse.Namespace) -> int:
    from moe_rl.drift.command import drift

    return drift([Path(run) for run in arguments.runs], arguments.last)


def _report(arguments: argparse.Namespace) -> int:
    from moe_rl.report.command import report

    return report([Path(run) for run in arguments.runs], Path(arguments.output) if arguments.output else None)


def _plan(arguments: argparse.Namespace) -> int:
    from moe_rl import config
    from moe_rl.plan.command import plan

    settings, top = config.load(arguments.config, arguments.overrides), None if arguments.all else arguments.top
    return plan(settings, plan_options.cluster(arguments), top, Path(arguments.json) if arguments.json else None)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        from moe_rl.cluster import cluster

        return cluster(arguments.config, arguments.overrides, arguments.processes)
    for name, value in (("--processes", arguments.processes), ("CONFIG", arguments.config)):
        if value is not None:
            raise UsageError(f"doctor: {name}={value}: only goes with --cluster")
    from moe_rl.doctor import doctor

    return doctor()


def _run(arguments: argparse.Namespace) -> int:
    """train, sft and eval. Where one that saves is asked to, and end, before there is anything to save, it only ends."""
    from parallel.launch import saving_signals_end

    saves = arguments.command != "eval"
    with saving_signals_end() if saves else contextlib.nullcontext():
        return _start(arguments, saves)


def _start(arguments: argparse.Namespace, saves: bool) -> int:
    """Everything a person can get wrong is looked at before a process or torch starts."""
    from parallel.failures import report_errors
    from parallel.launch import launch, launched_world

    world = launched_world(os.environ)
    try:
        with report_errors():
            from moe_rl import before_start, config  # here, as a library may be missing on one node

            settings = config.load(arguments.config, arguments.overrides)
            processes = world.size if world else settings.run.processes or settings.parallel.fewest_processes
            config.check(settings, processes)
            before_start.check(settings, arguments.command, processes, launched=world is not None)
    except UsageError:
        if world and world.local_rank:  # every rank of a node finds the same: one says it
            return 2
        raise
    if world or processes == 1:
        with report_errors():
            _entry(arguments.command)(settings)
        return 0
    command = [sys.executable, "-P", "-m", "moe_rl.cli", arguments.command, arguments.config, *arguments.overrides]
    return launch(command, processes, settings.run.threads, settings.run.saving_seconds if saves else 0.0)


def _entry(command: str) -> "Callable[[RunConfig], None]":
    """What runs on every rank."""
    if command == "train":
        from moe_rl.trainer import train as entry
    elif command == "sft":
        from moe_rl.sft import sft as entry
    else:
        from moe_rl.evaluation import evaluate as entry
    return entry


if __name__ == "__main__":
    sys.exit(main())
