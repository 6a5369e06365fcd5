"""A task of the user's own: task.name=MODULE:FUNCTION."""

import inspect
from typing import Any

from moe_rl.config_errors import near
from moe_rl.task_config import TaskSection
from moe_rl.tasks.importing import import_function
from parallel.errors import UsageError


def build(section: TaskSection) -> Any:
    """What FUNCTION(**task.options) returns; build_task checks that it has train, heldout and score.

    Raises UsageError where FUNCTION cannot be imported or does not take the options. What FUNCTION itself raises passes
    unchanged.
    """
    function = import_function("task.name", section.name)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say what they take
        return function(**section.options)
    try:
        signature.bind(**section.options)
    except TypeError as error:
        unknown = [option for option in section.options if option not in signature.parameters]
        hint = near(unknown[0], signature.parameters) if unknown else ""
        raise UsageError(f"task.name={section.name}: does not take these task.options: {error}{hint}") from error
    return function(**section.options)
