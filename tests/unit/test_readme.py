"""docs/settings.md lists every setting as it is, and the README's examples are what the command line takes.

`python tests/unit/test_readme.py` writes the table anew.
"""

import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from models.convert import manifest
from moe_rl import cli
from moe_rl.config import RunConfig
from moe_rl.config_errors import section_at

README = Path(__file__).parents[2] / "README.md"
SETTINGS = README.parent / "docs" / "settings.md"
BEGIN, END = "<!-- settings: written by tests/unit/test_readme.py -->\n", "<!-- end of settings -->"
_NAMES = {int: "integer", float: "number", bool: "true, false", str: "text", Path: "path", type(None): "null"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def reference() -> str:
    """A table a section: key, values, default, meaning."""
    parts = []
    for name in RunConfig.model_fields:
        rows = "\n".join(_rows([name]))
        parts.append(f"**{name}**\n\n| key | values | default | meaning |\n|---|---|---|---|\n{rows}")
    return "\n\n".join(parts) + "\n"


def _rows(path: list[str]) -> list[str]:
    """The keys of the section at `path`; those of a section within it stand where it does."""
    section = section_at(RunConfig, path)
    assert section is not None
    rows = []
    for key, field in section.model_fields.items():
        inner = [*path, key]
        rows += _rows(inner) if section_at(RunConfig, inner) else [_row(".".join(inner), field)]
    return rows


def _row(key: str, field: FieldInfo) -> str:
    default = "required, or from the preset" if field.is_required() else f"`{_text(field.default)}`"
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{key}` | {_values(field.annotation, field.metadata)} | {default} | {meaning} |"


def _text(value: object) -> str:
    return str(value) if isinstance(value, Path | str) else json.dumps(value)


def _values(annotation: Any, metadata: list[Any]) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _values(inner[0], [*inner[1:], *metadata])
    if origin is typing.Literal:
        return ", ".join(f"`{_text(value)}`" for value in inner)
    if isinstance(annotation, types.UnionType) or origin is typing.Union:
        return " or ".join(_values(one, metadata if one is not type(None) else []) for one in inner)
    if origin is list:
        return f"list of {_values(inner[0], [])}"
    if origin is dict:
        return "mapping"
    limits = [f"{sign} {getattr(one, name)}" for one in metadata for name, sign in _SIGNS.items() if hasattr(one, name)]
    return " ".join([_NAMES[annotation], *limits])


def test_every_setting_is_listed_as_it_is() -> None:
    written = SETTINGS.read_text().split(BEGIN)[1].split(END)[0]
    assert written.strip() == reference().strip(), "python tests/unit/test_readme.py writes it anew"


def test_every_example_is_one_the_command_line_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each `moe-rl train|sft|eval` line of the README, up to the point where processes would start."""
    text = README.read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    (problems,) = [body for language, body in blocks if language == "json"]
    (rewards,) = [body for language, body in blocks if language == "python"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "problems.jsonl").write_text(problems)
    (tmp_path / "my_rewards.py").write_text(rewards)
    (tmp_path / "configs").symlink_to(README.parent / "configs")
    for name in ("warm", "rl"):
        saved = tmp_path / "runs" / name / "checkpoints" / "step_000300"
        saved.mkdir(parents=True)
        (saved / "metadata.json").touch()
        manifest.write(saved, manifest.listed(saved, {}))
    started: list[list[str]] = []
    monkeypatch.setattr(cli, "_entry", lambda command: lambda config: started.append([command]))
    monkeypatch.setattr("parallel.launch.launch", lambda command, *_: bool(started.append(command)))
    commands = re.findall(r"^moe-rl +((?:train|sft|eval) +configs/[^#\n]*)", text, re.MULTILINE)
    assert len(commands) >= 8
    for line in commands:
        assert cli.main(line.split()) == 0, line
    assert len(started) == len(commands)


if __name__ == "__main__":
    before, rest = SETTINGS.read_text().split(BEGIN)
    SETTINGS.write_text(before + BEGIN + reference() + END + rest.split(END)[1])
