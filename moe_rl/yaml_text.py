"""YAML as the configs use it: `off` and `yes` are words and `1e-6` is a number (YAML 1.2), and no mapping holds a key twice."""

import re
from typing import Any

import yaml

from parallel.errors import UsageError

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for place, key in enumerate(keys) if key.value in {earlier.value for earlier in keys[:place]}]
        if twice:
            raise yaml.MarkedYAMLError(None, None, f"the key {twice[0].value!r} stands here twice", twice[0].start_mark)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 16) if text.startswith("0x") else int(text)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[Any, Any] = {}


# The same resolvers on both sides: the dumper quotes exactly what the loader would not read as text.
for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse(text: str, source: str) -> Any:
    """The value `text` stands for. Raises UsageError that begins with `source` (and the line) unless it is YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and "\n" in text else ""
        raise UsageError(f"{source}{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


def dump(value: Any) -> str:
    """YAML that `parse` reads back as an equal value, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
