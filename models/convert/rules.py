"""What a family's declaration is made of: rules that pair one Megatron tensor with the Hugging Face tensors that hold it.

A rule gives blocks, pieces without their names yet. It applies where the model has the Megatron tensor, so one declaration
serves models with and without biases, norms, shared experts or dense layers. `{e}` in a name is the expert's number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from models.config import ModelConfig
from models.convert.pieces import Index, Piece, whole
from models.convert.shapes import Shape


class Block(NamedTuple):
    """Block `source` of the tensor with number `which` among a rule's names is block `target` of its Megatron tensor."""

    which: int
    source: Index
    target: Index


@dataclass(frozen=True)
class Rule:
    """experts: "none"; "own": names are those of one expert's tensors; "fused": tensors hold all experts, in dimension 0."""

    key: str
    names: tuple[str, ...]
    blocks: Callable[[ModelConfig, Shape], Sequence[Block]]
    transposed: bool = False
    experts: str = "none"

    def pieces(self, model: ModelConfig, shape: Shape, key: str, prefix: str) -> list[Piece]:
        """Of the Megatron tensor `key` with `shape`, and tensors whose names begin with `prefix`."""
        found = []
        if self.experts == "none":
            return [self._piece(block, key, prefix, None) for block in self.blocks(model, shape)]
        blocks = self.blocks(model, shape[1:])
        for expert in range(shape[0]):
            here = (slice(expert, expert + 1),)
            for block in blocks:
                source = here + block.source if self.experts == "fused" else block.source
                found.append(self._piece(Block(block.which, source, here + block.target), key, prefix, expert))
        return found

    def _piece(self, block: Block, key: str, prefix: str, expert: int | None) -> Piece:
        name = prefix + self.names[block.which].replace("{e}", str(expert))
        return Piece(name, block.source, key, block.target, self.transposed)


def same(key: str, name: str) -> Rule:
    """One tensor that is the same on both sides."""
    return Rule(key, (name,), lambda model, shape: [Block(0, whole(shape), whole(shape))])


def vocabulary(key: str, name: str) -> Rule:
    """Rows for the words; Megatron's has some more, so that any tensor-parallel layout can split it."""

    def blocks(model: ModelConfig, shape: Shape) -> list[Block]:
        rows = whole((model.vocab_size, *shape[1:]))
        return [Block(0, rows, rows)]

    return Rule(key, (name,), blocks)


def stacked(key: str, *names: str) -> Rule:
    """Equal parts, one below the other: gate and up projection."""

    def blocks(model: ModelConfig, shape: Shape) -> list[Block]:
        height = shape[0] // len(names)
        part = whole((height, *shape[1:]))
        return [Block(i, part, (slice(i * height, (i + 1) * height), *part[1:])) for i in range(len(names))]

    return Rule(key, names, blocks)


def qkv(key: str, *names: str) -> Rule:
    """Queries, keys and values: Megatron keeps the heads of one key/value group together."""

    def blocks(model: ModelConfig, shape: Shape) -> list[Block]:
        rest, groups, size = whole(shape[1:]), model.kv_heads, model.head_dim
        found, start = [], 0
        for group in range(groups):
            for which, height in enumerate((model.heads // groups * size, size, size)):
                rows = slice(group * height, (group + 1) * height)
                found.append(Block(which, (rows, *rest), (slice(start, start + height), *rest)))
                start += height
        return found

    return Rule(key, names, blocks)


def rotary_halves(key: str, name: str, heads: Callable[[ModelConfig], int], first: Callable[[ModelConfig], int]) -> Rule:
    """Rows of `heads` heads, each `first` plain rows and then those that the rotary embedding turns: here as pairs of
    neighbours, as Megatron's latent attention has them, there as two halves. The same order in queries and keys, so the
    scores are the same."""

    def blocks(model: ModelConfig, shape: Shape) -> list[Block]:
        plain, half, rest = first(model), model.rope_head_dim // 2, whole(shape[1:])
        found = []
        for head in range(heads(model)):
            start = head * (plain + 2 * half)
            turned = start + plain
            found.append(Block(0, (slice(start, turned), *rest), (slice(start, turned), *rest)))
            for side in (0, 1):
                source = slice(turned + side * half, turned + (side + 1) * half)
                found.append(Block(0, (source, *rest), (slice(turned + side, turned + 2 * half, 2), *rest)))
        return found

    return Rule(key, (name,), blocks)


def interleaved(key: str, name: str) -> Rule:
    """Gate and up projection whose outputs alternate (GPT-OSS), where Megatron has one below the other."""

    def blocks(model: ModelConfig, shape: Shape) -> list[Block]:
        half, rest = shape[0] // 2, whole(shape[1:])
        sides = (0, 1)
        return [Block(0, (slice(side, shape[0], 2), *rest), (slice(side * half, (side + 1) * half), *rest)) for side in sides]

    return Rule(key, (name,), blocks)


def transposed(rule: Rule) -> Rule:
    """Matrices that are stored as [inputs, outputs] there."""

    def blocks(model: ModelConfig, shape: Shape) -> list[Block]:
        return [b._replace(source=(*b.source[:-2], b.source[-1], b.source[-2])) for b in rule.blocks(model, shape)]

    return replace(rule, blocks=blocks, transposed=True)


def each_expert(*rules: Rule) -> tuple[Rule, ...]:
    """Tensors of one expert each, its number {e} in their names."""
    return tuple(replace(rule, experts="own") for rule in rules)


def all_experts(*rules: Rule) -> tuple[Rule, ...]:
    """Tensors of all experts, dimension 0 their number."""
    return tuple(replace(rule, experts="fused") for rule in rules)
