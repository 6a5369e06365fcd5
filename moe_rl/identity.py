"""Whether a run that goes on has the problems and the vocabulary that it began with: settings name files, which may change."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from moe_rl.checkpoint import Progress
from moe_rl.config import RunConfig
from moe_rl.tasks import Task, Tokenizer, fingerprint
from parallel.errors import UsageError

_LOOKED_AT = 4096  # ids of a vocabulary, evenly spaced


def identity(task: Task, tokenizer: Tokenizer) -> Mapping[str, str]:
    """The fields `task` and `tokenizer` of Progress."""
    size, template = tokenizer.vocab_size, tokenizer.chat_template
    texts = [tokenizer.decode([i]) for i in range(0, size, max(1, size // _LOOKED_AT))]
    special = sorted(tokenizer.special_tokens.items())
    about = repr((size, tokenizer.eos_id, sorted(tokenizer.stop_ids), special, template, texts))
    return {"task": fingerprint(task), "tokenizer": hashlib.sha256(about.encode("utf-8", "surrogatepass")).hexdigest()}


def checked(progress: Progress, now: Mapping[str, str], config: RunConfig) -> Progress:
    """`progress` with fingerprints, where they were not known. Raises UsageError where one is not that of `now`."""
    task = config.task
    files = ", ".join(f"task.{key}={path}" for key in ("train_path", "eval_path") if (path := getattr(task, key)) is not None)
    places = {
        "task": (files or f"task.name={task.name}", "the problems are"),
        "tokenizer": (f"model.tokenizer={config.model.tokenizer}", "the vocabulary is"),
    }
    for key, (place, what) in places.items():
        if (was := getattr(progress, key)) and was != now[key]:
            raise UsageError(
                f"{place}: {what} not as when {config.directory} began; put back what was there, or begin anew under another "
                "run.name (with checkpoint.load, to keep the weights)"
            )
    return replace(progress, **now)
