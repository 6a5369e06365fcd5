"""Words spelt backwards: `reverse abc=` -> `cba`."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from moe_rl.task_config import TaskSection
from moe_rl.tasks.generator import Space, draw_problems, score_characters
from moe_rl.tasks.options import Options, parse_options
from moe_rl.tasks.task import Task


class ReversalOptions(Options):
    min_letters: int = Field(2, ge=1, le=64)
    max_letters: int = Field(4, ge=1, le=64, description="words are drawn evenly, so that most have this length")
    alphabet: str = "abcdefghijklmnopqrstuvwxyz"
    partial_credit: bool = Field(False, description="a wrong response earns half the share of its right characters")

    @field_validator("alphabet")
    @classmethod
    def _distinct(cls, alphabet: str) -> str:
        if not alphabet or len(set(alphabet)) < len(alphabet) or any(c.isspace() or c == "=" for c in alphabet):
            raise ValueError("must be one or more different characters, none of them white space or =")
        return alphabet

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_letters > self.max_letters:
            raise ValueError(
                f"task.options.min_letters={self.min_letters}: must be at most task.options.max_letters={self.max_letters}"
            )
        return self


def build(section: TaskSection) -> Task:
    options = parse_options(ReversalOptions, section.options)
    letters = len(options.alphabet)
    words = [letters**length for length in range(options.min_letters, options.max_letters + 1)]  # of each length

    def problem(number: int) -> tuple[str, str]:
        length = options.min_letters
        for count in words:
            if number < count:
                break
            number, length = number - count, length + 1
        word = ""
        for _ in range(length):
            number, letter = divmod(number, letters)
            word += options.alphabet[letter]
        return f"reverse {word}=", word[::-1]

    return draw_problems(Space(sum(words), problem), section, score_characters(options.partial_credit))
