"""What a run trains on, and how its prompts are made."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from moe_rl.section import Section


class TaskSection(Section):
    name: str = Field(
        default="addition",
        description="addition | reversal | reasoning_gym:NAME | file | MODULE:FUNCTION (a function that returns a Task)",
    )
    options: dict[str, Any] = Field(default={}, description="the task's own parameters, such as digits: 2")
    train_path: Path | None = Field(default=None, description="file: JSON lines, or Parquet (*.parquet); docs/data.md")
    eval_path: Path | None = Field(default=None, description="file: held-out file; none: a share of train_path")
    prompt_column: str | None = Field(
        default=None, description="file: none: prompt, question, problem or messages, whichever there is; a.b: nested"
    )
    answer_column: str | None = Field(
        default=None,
        description="file: none: answer, solution, response, completion, reward_model.ground_truth or the conversation's last "
        "turn, whichever there is",
    )
    chat: Literal["auto", True, False] = Field(
        default="auto", description="prompts go through the tokenizer's chat template; auto: where it has one"
    )
    system: str | None = Field(default=None, description="system turn in front of conversations that have none")
    template_options: dict[str, Any] = Field(
        default={}, description="variables of the chat template, such as enable_thinking: false"
    )
    scorer: str = Field(default="exact", description="file: exact | numeric | math_verify | MODULE:FUNCTION(response, answer)")
    train_size: PositiveInt = Field(default=4096, description="problems a generator task makes for training")
    eval_size: PositiveInt = Field(default=256, description="held-out problems")
    on_reward_error: Literal["stop", "zero"] = Field(default="stop", description="when a reward raises or is not finite")
    seed: NonNegativeInt = Field(default=0, description="of the problems and of the train / held-out split; not of the run")
