"""Sums of small numbers: `37+48=` -> `85`. Needs nothing installed, and a tiny model learns it in minutes."""

from pydantic import Field, field_validator

from moe_rl.task_config import TaskSection
from moe_rl.tasks.generator import Space, draw_problems, score_characters
from moe_rl.tasks.options import Options, parse_options
from moe_rl.tasks.task import Task


class AdditionOptions(Options):
    digits: int = Field(2, ge=1, le=18, description="operands have 1 to so many digits")
    operations: str = Field("+", description="any of + - *, drawn evenly")
    partial_credit: bool = Field(False, description="a wrong response earns half the share of its right characters")

    @field_validator("operations")
    @classmethod
    def _known(cls, operations: str) -> str:
        if not operations or set(operations) - set("+-*") or len(set(operations)) < len(operations):
            raise ValueError("must be one or more of + - *, each once and without spaces, such as '+-'")
        return operations


def build(section: TaskSection) -> Task:
    """Held out and train are split by the ordered pair: 37+48 and 48+37 are two prompts."""
    options = parse_options(AdditionOptions, section.options)
    operands = 10**options.digits

    def problem(number: int) -> tuple[str, str]:
        rest, left = divmod(number, operands)
        which, right = divmod(rest, operands)
        operation = options.operations[which]
        answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
        return f"{left}{operation}{right}=", str(answer)

    space = Space(len(options.operations) * operands**2, problem)
    return draw_problems(space, section, score_characters(options.partial_credit))
