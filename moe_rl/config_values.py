"""Files and `key.path=value` overrides to plain nested dicts, before any type is checked."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from moe_rl import yaml_text
from moe_rl.config_errors import holds_one_value, near, section_at, show, takes_number
from parallel.errors import UsageError


def read(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    """The mapping of sections in a YAML file; a section, at any depth, whose keys are all commented out is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        beside = path.parent.glob("*.yaml") if path.parent.is_dir() else ()
        raise UsageError(f"{path}: no such file{near(str(path), map(str, beside))}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot be read as text: {reason}") from error
    values = yaml_text.parse(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}: must hold a mapping of sections (run:, model:, ...), not {show(values)}")
    return _without_empty(values, model)


def _without_empty(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """`values` with {} where a section, at any depth, has nothing under it."""
    result = {}
    for key, value in values.items():
        section = section_at(model, [key]) if isinstance(key, str) else None
        if section is not None and (value is None or isinstance(value, dict)):
            value = _without_empty(value or {}, section)
        result[key] = value
    return result


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section."""
    result = copy.deepcopy(dict(below))
    for key, value in above.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return result


def override(values: dict[str, Any], text: str, model: type[BaseModel]) -> None:
    """Sets in `values` what one `key.path=value` says."""
    dotted, equals, value = text.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        raise UsageError(f"override {show(text)}: must be key.path=value, such as run.steps=20")
    holder = values
    for depth, name in enumerate(names[:-1], start=1):
        inside = holder.get(name)
        if inside is None and not holds_one_value(model, names[:depth]):
            inside = holder[name] = {}
        if not isinstance(inside, dict):
            raise UsageError(f"override {show(text)}: {'.'.join(names[:depth])} is no section, it holds one value")
        holder = inside
    holder[names[-1]] = yaml_text.parse(value, f"override {show(text)}")


def check_numbers(values: object, model: type[BaseModel], path: tuple[str, ...] = ()) -> None:
    """Raises UsageError at an infinite or undefined number, and at true or false where a number belongs."""
    if isinstance(values, float) and not math.isfinite(values):
        raise UsageError(f"{'.'.join(path)}={values}: must be finite")
    if isinstance(values, bool) and takes_number(model, path):
        raise UsageError(f"{'.'.join(path)}={show(values)}: must be a number")
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        check_numbers(value, model, (*path, str(key)))
