"""A user's function by the name MODULE:FUNCTION."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from moe_rl.config_errors import near
from parallel.errors import UsageError


def import_function(key: str, name: str) -> Callable[..., Any]:
    """The function that `name`, MODULE:FUNCTION, names. MODULE may lie in the current directory, which goes to the head of
    sys.path as `python -m` does it. Raises UsageError naming the dotted `key`, what could not be imported, and why."""
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not function_name.isidentifier():
        raise UsageError(f"{key}={name}: must be MODULE:FUNCTION, such as my_package.rewards:score")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported, and the user needs the line
        raise UsageError(f"{key}={name}: cannot import {module_name}: {_reason(error, module_name)}") from error
    function = getattr(module, function_name, None)
    if function is None:
        raise UsageError(f"{key}={name}: {module_name} has no {function_name}{near(function_name, dir(module))}")
    if not callable(function):
        raise UsageError(f"{key}={name}: {function_name} is not a function but {type(function).__name__}")
    return function


def _reason(error: Exception, module_name: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return f"there is no module {error.name} in the current directory or among the installed packages"
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = "importlib" in last.filename or isinstance(error, SyntaxError)  # then the last frame is not the user's
    where = "" if inside else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
