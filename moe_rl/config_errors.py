"""What pydantic found wrong with a configuration, as one line a person can act on."""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN = 60


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line: the dotted key, its value, the constraint; for an unknown key the near name. An unknown key comes first,
    since a misspelt key is often also a missing one."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return _explain_one(found[0], model) + more


def near(word: str, words: Iterable[str]) -> str:
    """ "; did you mean X?" for the nearest of `words`, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def section_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The section of `model` that `path` leads to; None where it leads to something else."""
    current = model
    for name in path:
        field = current.model_fields.get(name)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return None
        current = inner
    return current


def holds_one_value(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Whether `path` is a known key under which no other key can stand."""
    holder = section_at(model, path[:-1])
    field = holder.model_fields.get(path[-1]) if holder else None
    return field is not None and _model_in(field.annotation) is None and typing.get_origin(field.annotation) is not dict


def takes_number(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Whether `path` is a known key whose value is a number, not true or false."""
    holder = section_at(model, path[:-1]) if path else None
    field = holder.model_fields.get(path[-1]) if holder else None
    kinds = _kinds(field.annotation) if field else set()
    return bool not in kinds and not kinds.isdisjoint({int, float})


def show(value: object) -> str:
    """A value as it is written in YAML, on one line, cut where it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or (value if isinstance(value, str) and value.isprintable() and value else repr(value))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _explain_one(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    path, kind, value = error["loc"], error["type"], error["input"]
    key = _dotted(path)
    if kind == "invalid_key":  # no text: 1, null
        return f"unknown key {'.'.join(str(part) for part in path if part != '[key]')}"
    if kind == "extra_forbidden":
        return f"unknown key {key}{_near_key(path, model)}"
    if kind == "missing":
        return f"{key}: missing{_HINTS.get(key.split('.')[0], '')}"
    if kind == "value_error":  # a validator of ours: its text names the keys
        return str(error.get("ctx", {}).get("error", error["msg"]))
    if kind == "model_type":
        return f"{key}={show(value)}: must be a section, a mapping of keys to values"
    constraint = error["msg"].replace("Input should", "must").replace("String should", "must")
    if kind in ("bool_parsing", "bool_type"):
        constraint = "must be true or false"
    if kind == "string_type" and isinstance(value, int | float):
        constraint += "; put it in quotes"
    if kind == "literal_error" and isinstance(value, str):
        choices = str(error.get("ctx", {}).get("expected", ""))
        constraint += near(value, choices.replace("'", "").replace(" or ", ", ").split(", "))
    return f"{key}={show(value)}: {constraint}"


_HINTS = {"model": "; give model.preset or the whole shape (layers, hidden, heads, ...)"}


def _near_key(path: Sequence[str | int], model: type[BaseModel]) -> str:
    """A sibling that is spelt alike, else a key of the same or a like name in another section."""
    section, name = [str(part) for part in path[:-1]], str(path[-1])
    holder = section_at(model, section)
    siblings = list(holder.model_fields) if holder else []
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"; did you mean {'.'.join([*section, close[0]])}?"
    within = (
        {dotted.rpartition(".")[2]: dotted for dotted in _keys(holder, ".".join(section) + ".")} if section and holder else {}
    )
    if close := difflib.get_close_matches(name, within, n=1, cutoff=0.8):
        return f"; did you mean {within[close[0]]}?"
    # of two alike, the one that lies least deep, then the first
    by_depth = sorted(reversed(list(_keys(model))), key=lambda dotted: -dotted.count("."))
    everywhere = {dotted.rpartition(".")[2]: dotted for dotted in by_depth}
    close = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    return f"; did you mean {everywhere[close[0]]}?" if close else ""


def _keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Every key and every section, dotted."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        yield prefix + name
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section class of an annotation `Section` or `Section | None`."""
    return next((kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _kinds(annotation: Any) -> set[Any]:
    """The alternatives of an annotation, without what narrows them: {int, None} for `PositiveInt | None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return set().union(*map(_kinds, typing.get_args(annotation)))
    return {annotation}


def _dotted(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
