"""What a person can get wrong, looked at before a process or torch starts."""

from moe_rl import checkpoint_paths, tracking, weights
from moe_rl.config import RunConfig
from moe_rl.rundir import goes_on
from moe_rl.tasks import build_encoder, build_task, build_tokenizer, check_prompts, check_vocab, fitting
from parallel.errors import UsageError


def check(settings: RunConfig, command: str, processes: int, *, launched: bool) -> None:
    """Raises UsageError for what `moe-rl COMMAND` (train, sft or eval) in so many processes would stumble over once it has
    started. launched: one of many does it."""
    tracking.check(settings.tracking, settings.directory)
    if settings.checkpoint.load is not None and not settings.checkpoint.load.is_dir():
        raise UsageError(f"checkpoint.load={settings.checkpoint.load}: no such directory")
    checkpoints = settings.directory / "checkpoints"
    begun = bool(checkpoint_paths.numbered(checkpoints))  # then it has its critic
    newest = checkpoint_paths.newest(checkpoints)
    if command == "train" and newest is not None and checkpoint_paths.is_within_step(newest) and goes_on(settings, command):
        checkpoint_paths.check_layout(newest, settings.parallel, processes)
    if settings.critic.load is not None and settings.algorithm.trains_critic and not begun:
        checkpoint_paths.find_critic(settings.critic.load, "critic.load")
    if command == "eval":
        weights.check(weights.evaluated(settings), settings.model, reads=not launched)
    elif not begun:
        weights.check(weights.initial(settings), settings.model, reads=not launched)
    trains = command != "eval"
    task = build_task(settings.task, trains=trains)
    tokenizer = build_tokenizer(settings.model.tokenizer)
    check_vocab(tokenizer, settings.model.vocab_size)
    encoder, longest = build_encoder(tokenizer, settings.task, settings.rollout), settings.model.max_positions
    check_prompts(task, encoder, longest, settings.rollout.max_response_tokens, trains=trains)
    fresh = command == "train" and weights.initial(settings) is None  # then it has a warm start
    if settings.sft.steps and (command == "sft" or fresh):
        fitting(task.train, encoder, longest, settings.sft.train_on, settings.sft.too_long)
