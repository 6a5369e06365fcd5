"""Whether a task's prompts and examples fit a model."""

from collections.abc import Sequence
from typing import Literal

from moe_rl.tasks.encoding import Encoder, Example
from moe_rl.tasks.task import Task
from moe_rl.types import Problem
from parallel.errors import UsageError


def check_prompts(task: Task, encoder: Encoder, max_positions: int, max_response_tokens: int, *, trains: bool = True) -> int:
    """Tokens of the longest prompt of both splits. trains: that for training must have one.

    Raises UsageError where a split has no prompt, a prompt has no token, or the longest one leaves less than
    `max_response_tokens` of the model's `max_positions`.
    """
    longest, longest_id, too_long = 0, "", 0
    for split, problems in (("train", task.train), ("heldout", task.heldout)):
        if not problems and (trains or split == "heldout"):
            raise UsageError(f"task.name: the task has no {split} prompts; it needs at least one")
        for problem in problems:
            tokens = len(encoder.prompt(problem))
            if tokens <= encoder.prefix:
                raise UsageError(f"problem {problem.id}: its prompt {problem.prompt!r} has no tokens; remove it")
            too_long += tokens + max_response_tokens > max_positions
            if tokens > longest:
                longest, longest_id = tokens, problem.id
    if too_long:
        count = f" ({too_long} prompts are too long)" if too_long > 1 else ""
        raise UsageError(
            f"problem {longest_id}: its prompt of {longest} tokens and rollout.max_response_tokens={max_response_tokens} "
            f"exceed model.max_positions={max_positions}{count}; raise model.max_positions to {longest + max_response_tokens}, "
            "lower rollout.max_response_tokens, or leave long prompts out"
        )
    return longest


def example_that_fits(
    problem: Problem, encoder: Encoder, max_positions: int, train_on: Literal["last", "all"], too_long: Literal["error", "skip"]
) -> Example | None:
    """The example of `problem`; None where it has more than `max_positions` tokens and too_long is "skip", otherwise a
    UsageError that names it. The last token is only a target, but a reader counts it, too."""
    example = encoder.example(problem, train_on)
    if len(example.ids) <= max_positions:
        return example
    if too_long == "skip":
        return None
    raise UsageError(
        f"problem {problem.id}: its prompt and answer of {len(example.ids)} tokens exceed model.max_positions={max_positions}; "
        "raise that, leave long examples out, or set sft.too_long=skip"
    )


def fitting(
    problems: Sequence[Problem],
    encoder: Encoder,
    max_positions: int,
    train_on: Literal["last", "all"],
    too_long: Literal["error", "skip"],
) -> list[Problem]:
    """The problems whose examples fit. Raises UsageError where none does, and as example_that_fits."""
    kept = [one for one in problems if example_that_fits(one, encoder, max_positions, train_on, too_long) is not None]
    if not kept:
        raise UsageError(
            f"sft.too_long=skip: all {len(problems)} examples exceed model.max_positions={max_positions}; raise it"
        )
    return kept
