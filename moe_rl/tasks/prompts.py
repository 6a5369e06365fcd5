"""Whether a task's prompts fit a model."""

from moe_rl.tasks.task import Task
from moe_rl.tasks.tokenizer import Tokenizer
from parallel.errors import UsageError


def check_prompts(
    task: Task, tokenizer: Tokenizer, max_positions: int, max_response_tokens: int, *, trains: bool = True
) -> int:
    """Tokens of the longest prompt of both splits. trains: that for training must have one.

    Raises UsageError where a split has no prompt, a prompt has no token, or the longest one leaves less than
    `max_response_tokens` of the model's `max_positions`.
    """
    longest, longest_id, too_long = 0, "", 0
    prefix = len(tokenizer.encode_prompt(""))  # special tokens
    for split, problems in (("train", task.train), ("heldout", task.heldout)):
        if not problems and (trains or split == "heldout"):
            raise UsageError(f"task.name: the task has no {split} prompts; it needs at least one")
        for problem in problems:
            tokens = len(tokenizer.encode_prompt(problem.prompt))
            if tokens <= prefix:
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
