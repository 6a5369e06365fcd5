"""task.options of a built-in task, typed and checked."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from moe_rl.config_errors import near, show
from parallel.errors import UsageError


class Options(BaseModel):
    """Base of a task's options: immutable, an unknown name is an error, and no type is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def parse_options[Parsed: Options](model: type[Parsed], options: Mapping[str, Any]) -> Parsed:
    """Raises UsageError naming task.options.NAME, the value and the constraint."""
    check_names(options, model.model_fields)
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise UsageError(explain_option(error)) from error


def check_names(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises UsageError for the first option that is not in `known`."""
    names = list(known)
    for option in options:
        if option not in names:
            has = f"the options are {', '.join(names)}" if names else "this task has no options"
            raise UsageError(
                f"unknown key task.options.{option}; {has}{near(option, names)} (task.options={{}} clears those in the file, "
                "which may be another task's)"
            )


def explain_option(error: ValidationError) -> str:
    """One line on the first thing that pydantic found wrong."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error" and not first["loc"]:  # a check over several options: its text names them
        return str(first["ctx"]["error"]) if "ctx" in first else first["msg"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    if first["type"] == "missing":
        return f"task.options{key}: missing"
    constraint = first["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("String should", "must")
    return f"task.options{key}={show(first['input'])}: {constraint}"
