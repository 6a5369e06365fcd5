"""Any procedural task of the package reasoning-gym, by the name reasoning_gym:NAME."""

import dataclasses
import difflib
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moe_rl.config_errors import show
from moe_rl.task_config import TaskSection
from moe_rl.tasks.options import check_names, explain_option
from moe_rl.tasks.task import ProblemSet, Score, Task, prompt_key
from moe_rl.tasks.untrusted import is_plain_formula, is_plain_literal, time_limit
from moe_rl.types import Problem
from parallel.errors import UsageError

PREFIX = "reasoning_gym:"
_OURS = ("size", "seed")  # fields of every config of reasoning-gym that task.train_size, .eval_size and .seed decide
_HELDOUT_SHARE = 10

# What generators and verifiers raise on a config, or on a response, that they cannot deal with.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)

# These order words by Python's hash of strings, which differs from process to process.
_HASH_DEPENDENT = frozenset(
    "codeio isomorphic_strings knight_swap list_functions polynomial_multiplication ransom_note word_ladder".split()
)
# These evaluate the response as Python (0.1.25): "exit()" would end the run. They are shown harmless text only.
_EVALUATES: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_plain_literal),
    **dict.fromkeys(
        ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
        is_plain_formula,
    ),
}


def build(section: TaskSection) -> Task:
    """task.options is the config of the task in reasoning-gym; size and seed follow from the section.

    An option of ours, prompt_suffix (a newline unless given), ends each prompt, so that a model sees where its answer
    begins. The prompts of a split are distinct; where few are left, a split is smaller than asked for. Held out are
    problems from another seed whose prompts are not among those for training; where the task has so few problems that
    those are less than a tenth, prompts move over from training.

    Score: the verifier's value for the response without the white space around it. Many verifiers give part of a point,
    and some give 0.01 for a wrong answer; the reward keeps that, and `correct` needs the full 1. A response that a verifier
    cannot read (prime_factorization raises ValueError on words), or needs more than 5 seconds for, scores 0; one that it
    might execute scores as a blank one. A task without a reference answer (graph_color) gives problems with the answer "".

    Raises UsageError naming the key for a missing package, an unknown NAME or option, a refused value, and for a task whose
    problems would differ between processes. It makes all problems at once: a few tasks (knight_swap) need 0.5 s for each.
    """
    name = section.name.removeprefix(PREFIX)
    suffix = section.options.get("prompt_suffix", "\n")
    if not isinstance(suffix, str):
        raise UsageError(f"task.options.prompt_suffix={show(suffix)}: must be a text")
    options = {option: value for option, value in section.options.items() if option != "prompt_suffix"}
    make = _dataset_maker(name, section.name, options)
    seeds = random.Random(f"reasoning_gym {section.seed}")
    dataset = make(section.train_size, seeds.getrandbits(31))
    train = _distinct(dataset, section.train_size, suffix, taken=())
    other = make(2 * section.eval_size, seeds.getrandbits(31))
    heldout = _distinct(other, section.eval_size, suffix, taken=train)
    short = min(section.eval_size, max(1, (len(train) + len(heldout)) // _HELDOUT_SHARE)) - len(heldout)
    if short > 0:
        for prompt in seeds.sample(list(train), min(short, len(train) - 1)):
            heldout[prompt] = train.pop(prompt)
    if not heldout:
        raise UsageError(f"task.options: {section.name} makes 1 distinct prompt with them; needs 2, one of them to hold out")
    splits = {"train": train, "heldout": heldout}
    entries = {f"{split}/{i}": entry for split, found in splits.items() for i, entry in enumerate(found.values())}

    def score(response: str, problem: Problem) -> Score:
        return _score(dataset, name, response.strip(), entries[problem.id])

    for entry in list(train.values())[:1]:  # a verifier that breaks on its own answer is broken, not the response
        if entry["answer"] is not None:
            dataset.score_answer(entry["answer"], entry)
    return ProblemSet(*(_problems(split, found, suffix) for split, found in splits.items()), score_function=score)


def _dataset_maker(name: str, key: str, options: dict[str, Any]) -> Callable[[int, int], Any]:
    """A function of (size, seed) that makes the dataset `name`, its options checked."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UsageError(f"task.name={key}: needs the package reasoning-gym; pip install 'moe-rl[tasks]'") from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; it has {', '.join(sorted(DATASETS))}"
        raise UsageError(f"task.name={key}: reasoning-gym has no task {show(name)}{hint}")
    dataset_class, config_class = DATASETS[name]
    _check_options(config_class, options)
    parts = _parts(name, options)
    if sys.flags.hash_randomization and (unstable := sorted(_HASH_DEPENDENT.intersection(parts))):
        raise UsageError(
            f"task.name={key}: the problems of {', '.join(unstable)} differ from process to process unless Python hashes texts "
            "alike; start with PYTHONHASHSEED=0 in the environment"
        )

    def make(size: int, seed: int) -> Any:
        try:
            config = TypeAdapter(config_class).validate_python({**options, "size": size, "seed": seed})
            return dataset_class(config=config)
        except ValidationError as error:
            raise UsageError(explain_option(error)) from error
        except _REFUSALS as error:
            raise UsageError(f"task.options={show(options)}: {key} refuses them: {_line(error)}") from error

    return make


def _check_options(config_class: type, options: Mapping[str, Any]) -> None:
    for option in _OURS:
        if option in options:
            ours = "task.seed" if option == "seed" else "task.train_size and task.eval_size"
            raise UsageError(f"task.options.{option}={show(options[option])}: is not set here; set {ours}")
    fields = [field.name for field in dataclasses.fields(config_class) if field.name not in _OURS]
    check_names(options, [*fields, "prompt_suffix"])


def _parts(name: str, options: Mapping[str, Any]) -> list[str]:
    """The tasks that `name` draws from: itself, or those of the composite."""
    parts = options.get("datasets") if name == "composite" else None
    return [str(part.get("name")) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [name]


def _distinct(dataset: Any, count: int, suffix: str, taken: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Up to `count` entries by prompt key, none of them `taken`, from the head of the dataset."""
    found: dict[str, dict[str, Any]] = {}
    taken = set(taken)
    for number in range(len(dataset)):
        try:
            entry = dataset[number]
        except _REFUSALS as error:
            raise UsageError(
                f"task.options: {type(dataset).__name__} cannot make a problem with them: {_line(error)}"
            ) from error
        prompt = prompt_key(entry["question"] + suffix)
        if prompt not in taken:
            found.setdefault(prompt, entry)
        if len(found) == count:
            break
    return found


def _problems(split: str, entries: Mapping[str, dict[str, Any]], suffix: str) -> list[Problem]:
    return [
        Problem(f"{split}/{i}", entry["question"] + suffix, "" if entry["answer"] is None else str(entry["answer"]))
        for i, entry in enumerate(entries.values())
    ]


def _score(dataset: Any, name: str, response: str, entry: dict[str, Any]) -> Score:
    harmless = _EVALUATES.get(entry["metadata"].get("source_dataset", name))
    if harmless and not harmless(response):
        response = ""
    try:
        with time_limit():
            value = float(dataset.score_answer(response, entry))
    except _REFUSALS:  # TimeoutError is an OSError
        return Score(0.0)
    # a sum of equal shares may round to just above 1, which the exact answer never gets
    return Score(min(value, 1.0), passed=value == 1.0)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
