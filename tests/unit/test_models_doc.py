"""docs/models.md: its example is what it says, its table has every family, and its commands are ones that there are."""

import re
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.convert import families
from models.convert.families import FAMILIES, Family
from models.convert.huggingface import describe, piece_map
from moe_rl import cli
from tests.hf_checkpoints import make

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_the_example_of_a_family_is_the_whole_of_it(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = dict(vars(families))
    exec(code, names)
    make("mixtral", tmp_path, num_hidden_layers=2)
    built_in = describe(tmp_path)
    family: Family = names["MIXTRAL"]
    assert family is not FAMILIES["mixtral"] and family.values(built_in.hf) == FAMILIES["mixtral"].values(built_in.hf)
    ours = piece_map(type(built_in)(built_in.directory, "", built_in.hf, family, built_in.values), built_in.model())
    assert ours.by_name == piece_map(built_in, built_in.model()).by_name


def test_the_table_has_every_family() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", TEXT, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row) if name != "model_type") == sorted(FAMILIES)


def test_commands_and_settings_that_are_named_exist() -> None:
    commands = re.findall(r"^moe-rl ([^#\n]*)", TEXT, re.MULTILINE)
    commands = [line.split() for line in commands if not line.startswith("error")]
    assert len(commands) == 3
    for line in commands:
        assert cli._parser().parse_args(line).command == line[0]
    assert {key for key in re.findall(r"`model\.([a-z_]+)[`=]", TEXT) if key != "json"} <= ModelConfig.model_fields.keys()
