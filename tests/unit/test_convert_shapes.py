"""What is said of a model's tensors by arithmetic is what Megatron builds and what transformers writes; blocks by hand."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from models.config import ModelConfig
from models.convert import huggingface
from models.convert.live import box_of
from models.convert.pieces import Piece, PieceMap
from models.convert.rules import Rule, interleaved, qkv, rotary_halves, transposed
from models.convert.shapes import EMBEDDING, OUTPUT, Shape, global_shapes
from models.initialise import global_shards
from models.model import MoEModel
from models.presets import PRESETS
from parallel.config import ParallelConfig
from parallel.groups import Groups, process_groups
from parallel.runtime import started
from tests.hf_checkpoints import FAMILIES, make

CPU = torch.device("cpu")
LATENT: dict[str, Any] = dict(kv_heads=4, kv_lora_rank=12, rope_head_dim=4, v_head_dim=10)
FIELDS: dict[str, dict[str, Any]] = {
    "as preset": {},
    "no qk norm": dict(qk_norm=False),
    "norm over heads": dict(qk_norm_span="all"),
    "qkv bias": dict(qkv_bias=True),
    "biases, sinks": dict(bias=True, attention_sinks=True, activation="quick_gelu"),
    "sinks alone": dict(attention_sinks=True),
    "one key head, large heads": dict(kv_heads=1, head_dim=24),
    "key heads as heads": dict(kv_heads=4),
    "dense layers": dict(dense_layers=[0, 2]),
    "dense layers, biases": dict(dense_layers=[1], bias=True),
    "dense": dict(experts=0, topk=0, moe_ffn=0),
    "shared": dict(shared_ffn=20),
    "shared, gated": dict(shared_ffn=20, shared_gate=True),
    "expert bias": dict(router_score="sigmoid", expert_bias=True),
    "moving expert bias": dict(router_score="sigmoid", load_balancing="expert_bias"),
    "tied": dict(tie_embeddings=True),
    "vocabulary 64": dict(vocab_size=64),
    "vocabulary 65": dict(vocab_size=65),
    "vocabulary 1000": dict(vocab_size=1000),
    "latent": LATENT,
    "latent, low-rank queries": LATENT | dict(q_lora_rank=28),
    "latent, dense, shared": LATENT | dict(dense_layers=[0], shared_ffn=20, router_score="sigmoid", expert_bias=True),
}
SMALL: dict[str, Any] = dict(layers=3, hidden=36, heads=4, kv_heads=2, head_dim=6, ffn=44, moe_ffn=26, experts=4, topk=2)


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with started(seed=0, threads=1, timeout_seconds=60), process_groups(ParallelConfig()) as groups:
        yield groups


def live_shapes(config: ModelConfig, groups: Groups) -> dict[str, Shape]:
    """Of the model that Megatron builds. Its parts must lie beside each other: each element in exactly one."""
    shapes: dict[str, Shape] = {}
    filled: dict[str, int] = {}
    for shard in global_shards(MoEModel(config, groups, CPU, seed=0).bare, groups, each_expert=False):
        assert shapes.setdefault(shard.key, tuple(shard.global_shape)) == tuple(shard.global_shape), shard.key
        assert all(0 <= s.start and s.stop <= size for s, size in zip(box_of(shard), shapes[shard.key], strict=True))
        filled[shard.key] = filled.get(shard.key, 0) + shard.data.numel()
    for key, shape in shapes.items():
        assert filled[key] == torch.Size(shape).numel(), key
    return shapes


@pytest.mark.parametrize("changes", FIELDS.values(), ids=FIELDS.keys())
def test_shapes_are_those_of_the_live_model_for_every_setting(changes: dict[str, Any], groups: Groups) -> None:
    config = ModelConfig.model_validate(PRESETS["tiny_moe"] | SMALL | changes)
    assert global_shapes(config) == live_shapes(config, groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_covers_both_sides_and_has_the_names_that_transformers_writes(
    family: str, groups: Groups, tmp_path: Path
) -> None:
    make(family, tmp_path)
    description = huggingface.describe(tmp_path)
    config = ModelConfig.model_validate(description.values)
    shapes = global_shapes(config)
    assert shapes == live_shapes(config, groups)
    pieces = huggingface.piece_map(description, config)
    pieces.check(shapes, {key: (config.vocab_size, config.hidden) for key in (EMBEDDING, OUTPUT) if key in shapes})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert pieces.hf_shapes() == written


def test_a_gap_and_an_overlap_are_found() -> None:
    def cover(*rows: slice) -> PieceMap:
        return PieceMap(Piece("w", (row,), "key", (row,)) for row in rows)

    cover(slice(0, 3), slice(3, 4)).check({"key": (4,)}, {})
    with pytest.raises(AssertionError, match=r"key \(4,\): 1 elements in no piece, 0 twice"):
        cover(slice(0, 3)).check({"key": (4,)}, {})
    with pytest.raises(AssertionError, match=r"key \(4,\): 0 elements in no piece, 2 twice"):
        cover(slice(0, 3), slice(1, 4)).check({"key": (4,)}, {})
    with pytest.raises(AssertionError, match=r"pieces of \['key'\], which the model lacks"):
        cover(slice(0, 3)).check({}, {})


def both_ways(rule: Rule, config: ModelConfig, shape: Shape, theirs: dict[str, Tensor]) -> Tensor:
    """The Megatron tensor of `shape`. What is read back from it, and from any two parts of it, must be the same."""
    pieces = PieceMap(rule.pieces(config, shape, "ours", ""))
    whole, box = torch.empty(shape), tuple(slice(0, n) for n in shape)
    pieces.to_megatron("ours", box, lambda name, index: theirs[name][index], whole)
    for name, tensor in theirs.items():
        assert torch.equal(pieces.to_hf(name, lambda key, index: whole[index]), tensor)
    for dimension, size in enumerate(shape):
        for cut in range(1, size):
            for part in (slice(0, cut), slice(cut, size)):
                box = tuple(part if d == dimension else slice(0, n) for d, n in enumerate(shape))
                got = torch.empty(whole[box].shape)
                pieces.to_megatron("ours", box, lambda name, index: theirs[name][index], got)
                assert torch.equal(got, whole[box]), (dimension, part)
    return whole


def config_with(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(PRESETS["tiny_moe"] | changes)


def test_queries_keys_and_values_by_hand() -> None:
    """Four heads of size 2 over two key/value heads: each group is two queries, a key and a value."""
    config = config_with(heads=4, kv_heads=2, head_dim=2)
    theirs = {"q": torch.arange(8.0)[:, None], "k": torch.arange(10.0, 14)[:, None], "v": torch.arange(20.0, 24)[:, None]}
    ours = both_ways(qkv("ours", "q", "k", "v"), config, (16, 1), theirs)
    assert ours[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def test_interleaved_and_transposed_by_hand() -> None:
    """Three inputs, outputs gate 0, up 0, gate 1, up 1: here gates come first, an output a row."""
    theirs = {"w": torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]])}
    ours = both_ways(transposed(interleaved("ours", "w")), config_with(), (4, 3), theirs)
    assert ours.tolist() == [[0, 10, 20], [2, 12, 22], [1, 11, 21], [3, 13, 23]]


def test_rotary_halves_by_hand() -> None:
    """Two heads of one plain row and four that turn: the halves (a b | c d) become the pairs (a c)(b d)."""
    config = config_with(heads=2, kv_heads=2, kv_lora_rank=4, rope_head_dim=4, v_head_dim=2, head_dim=2)
    theirs = {"w": torch.arange(10.0)[:, None]}
    ours = both_ways(rotary_halves("ours", "w", lambda m: m.heads, lambda m: 1), config, (10, 1), theirs)
    assert ours[:, 0].tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_part_of_a_tensor_is_that_part_of_the_whole(family: str, tmp_path: Path) -> None:
    """Boxes at odd places, as layouts with uneven parts would cut them."""
    make(family, tmp_path)
    description = huggingface.describe(tmp_path)
    config = ModelConfig.model_validate(description.values)
    pieces, read = huggingface.piece_map(description, config), huggingface.open_tensors(description).read
    for key, shape in global_shapes(config).items():
        whole = torch.empty(shape)
        pieces.to_megatron(key, tuple(slice(0, n) for n in shape), read, whole)
        if not key.startswith(("embedding", "output", "decoder.layers.1.")):
            continue
        cuts = [[slice(0, n // 3), slice(n // 3, n)] if n > 2 else [slice(0, n)] for n in shape]
        for box in itertools.product(*cuts):
            part = torch.empty(whole[box].shape)
            pieces.to_megatron(key, box, read, part)
            assert torch.equal(part, whole[box]), (key, box)
