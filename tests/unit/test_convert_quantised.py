"""Quantised weights, against transformers' own ways to expand them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from models.convert.quantised import Dequantised
from models.convert.safetensors_reader import Reader
from parallel.errors import UsageError
from tests.unit.test_convert_reader import random_slice

MXFP4 = {"quant_method": "mxfp4"}
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def opened(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[Reader, Dequantised]:
    save_file(tensors, folder / "model.safetensors")
    reader = Reader(folder)
    return reader, Dequantised(reader, config)


def packed(*shape: int) -> dict[str, Tensor]:
    """Random bytes; scales of ordinary size."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, shape, dtype=torch.uint8)
    return {"mlp.gate_up_proj_blocks": blocks, "mlp.gate_up_proj_scales": scales, "mlp.gate_up_proj_bias": torch.rand(3)}


def float8(rows: int, columns: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) / 100
    return {"q.weight": weight, "q.weight_scale_inv": scales, "norm.weight": torch.rand(4)}


def test_a_byte_holds_two_floats_the_low_half_first(tmp_path: Path) -> None:
    """By hand: 0x2F is -6 and 1, 0x91 is 0.5 and -0.5; scales 127, 128 and 125 are 1, 2 and 1/4."""
    blocks = torch.zeros(1, 1, 3, 16, dtype=torch.uint8)
    blocks[0, 0, :, 0] = torch.tensor([0x2F, 0x91, 0x2F])
    scales = torch.tensor([[[127, 128, 125]]], dtype=torch.uint8)
    _, source = opened(tmp_path, {"x_blocks": blocks, "x_scales": scales}, MXFP4)
    column = source.read("x")[0, :, 0]
    assert column[[0, 1, 32, 33, 64, 65]].tolist() == [-6.0, 1.0, 1.0, -1.0, -1.5, 0.25]
    assert column.count_nonzero() == 6


def test_every_byte_with_every_scale_is_as_transformers_has_it(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).expand(256, 16, 1, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1).expand(256, 16, 1).contiguous()
    _, source = opened(tmp_path, {"x_blocks": blocks, "x_scales": scales}, MXFP4)
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(source.read("x").view(torch.int16)[:255], wanted.view(torch.int16)[:255])
    assert torch.equal(source.read("x")[255].isfinite(), wanted[255].isfinite())  # 255 stands for no number


def test_experts_of_4_bits_appear_under_their_plain_names(tmp_path: Path) -> None:
    tensors = packed(3, 10, 2)
    _, source = opened(tmp_path, tensors, MXFP4)
    wanted = convert_moe_packed_tensors(tensors["mlp.gate_up_proj_blocks"], tensors["mlp.gate_up_proj_scales"])
    kinds = {name: (kind.dtype, kind.shape) for name, kind in source.names.items()}
    assert kinds == {"mlp.gate_up_proj": (torch.bfloat16, (3, 64, 10)), "mlp.gate_up_proj_bias": (torch.float32, (3,))}
    assert torch.equal(source.read("mlp.gate_up_proj"), wanted)
    assert torch.equal(source.read("mlp.gate_up_proj_bias"), tensors["mlp.gate_up_proj_bias"])


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (2304, 128)])
def test_8_bit_matrices_are_as_transformers_has_them(tmp_path: Path, rows: int, columns: int) -> None:
    tensors = float8(rows, columns)
    _, source = opened(tmp_path, tensors, FLOAT8)
    wanted = Fp8Dequantize(None)._dequantize_one(tensors["q.weight"], tensors["q.weight_scale_inv"], torch.bfloat16)
    kinds = {name: (kind.dtype, kind.shape) for name, kind in source.names.items()}
    assert kinds == {"q.weight": (torch.bfloat16, (rows, columns)), "norm.weight": (torch.float32, (4,))}
    assert torch.equal(source.read("q.weight"), wanted)
    assert torch.equal(source.read("norm.weight"), tensors["norm.weight"])


def test_blocks_at_the_edge_are_smaller(tmp_path: Path) -> None:
    """transformers' loader refuses those, its kernels and DeepSeek's have them: against a loop."""
    tensors = float8(200, 130)
    _, source = opened(tmp_path, tensors, FLOAT8)
    weight, scales = tensors["q.weight"].float(), tensors["q.weight_scale_inv"]
    wanted = torch.tensor([[float(weight[i, j] * scales[i // 128, j // 128]) for j in range(130)] for i in range(200)])
    assert torch.equal(source.read("q.weight"), wanted.bfloat16())


def test_what_transformers_quantises_comes_back(tmp_path: Path) -> None:
    """Within half a step of 3 bits of mantissa: 1/16 of each value, next to 0 of the smallest."""
    torch.manual_seed(0)
    weight = torch.randn(256, 128).bfloat16()
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(weight_block_size=(128, 128)))
    tensors = {k: v.contiguous() for k, v in Fp8Quantize(quantizer)._quantize_one("q.weight", weight).items()}
    assert tensors.keys() == {"q.weight", "q.weight_scale_inv"}
    _, source = opened(tmp_path, tensors, FLOAT8)
    assert torch.allclose(source.read("q.weight").float(), weight.float(), rtol=1 / 15, atol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "config", "name"),
    [(packed(3, 20, 5), MXFP4, "mlp.gate_up_proj"), (float8(1300, 300), FLOAT8, "q.weight")],
    ids=["mxfp4", "fp8"],
)
def test_a_part_is_that_slice_of_the_whole(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], name: str
) -> None:
    _, source = opened(tmp_path, tensors, config)
    whole, generator = source.read(name), random.Random(0)
    for _ in range(100):
        index = tuple(random_slice(generator, size) for size in whole.shape[: generator.randint(0, whole.ndim)])
        assert torch.equal(source.read(name, index), whole[index]), index


def test_only_the_blocks_of_a_part_are_read(tmp_path: Path) -> None:
    (tmp_path / "4").mkdir()
    reader, source = opened(tmp_path / "4", packed(4, 512, 8), MXFP4)
    source.read("mlp.gate_up_proj", (slice(1, 2),))
    assert reader.bytes_read == 512 * 8 * 17
    source.read("mlp.gate_up_proj", (slice(1, 2), slice(None), slice(0, 128)))
    assert reader.bytes_read == 640 * 8 * 17
    reader, source = opened(tmp_path, float8(1024, 512), FLOAT8)
    source.read("q.weight", (slice(256, 512),))
    assert reader.bytes_read == 256 * 512 + 2 * 4 * 4


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantization_config\.quant_method=gptq: must be mxfp4 or fp8; bring weights"),
        ({}, r"quantization_config\.quant_method=None: must be mxfp4 or fp8"),
        ({"quant_method": "fp8"}, r"quantization_config\.weight_block_size=None: must be two sizes, such as \[128, 128\]"),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            r"quantization_config\.weight_block_size=\[0, 128\]: must be two sizes",
        ),
    ],
)
def test_another_way_of_quantising_is_refused(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=f"^{text}"):
        opened(tmp_path, float8(128, 128), config)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("mlp.gate_up_proj_scales", None, r"uint8 \[3, 10, 2, 16\] with mlp\.gate_up_proj_scales: absent; must be"),
        ("mlp.gate_up_proj_scales", torch.zeros(3, 10, 3, dtype=torch.uint8), r"_scales: uint8 \[3, 10, 3\]; must be uint8 "),
        ("mlp.gate_up_proj_scales", torch.zeros(3, 10, 2), r"gate_up_proj_scales: float32 \[3, 10, 2\]; must be uint8 "),
        ("mlp.gate_up_proj_blocks", torch.zeros(3, 10, 2, 8, dtype=torch.uint8), r"uint8 \[3, 10, 2, 8\] with"),
    ],
)
def test_4_bit_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, tensor: Tensor | None, text: str) -> None:
    tensors = packed(3, 10, 2)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(UsageError, match=f"^tensor mlp.gate_up_proj_blocks: .*{text}"):
        opened(tmp_path, tensors, MXFP4)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        (
            "q.weight_scale_inv",
            None,
            r"q\.weight: float8_e4m3fn \[256, 128\] with q\.weight_scale_inv: absent; must be a float8",
        ),
        (
            "q.weight_scale_inv",
            torch.ones(1, 1),
            r"scale_inv: float32 \[1, 1\]; .* and its scales, one for each 128 x 128; fetch",
        ),
        ("q.weight", torch.ones(256, 128, dtype=torch.int8), r"tensor q\.weight: int8 \[256, 128\] with"),
        ("q.weight", torch.ones(2, 256, 128).to(torch.float8_e4m3fn), r"q\.weight: float8_e4m3fn \[2, 256, 128\] with"),
    ],
)
def test_8_bit_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, tensor: Tensor | None, text: str) -> None:
    tensors = float8(256, 128)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(UsageError, match=text):
        opened(tmp_path, tensors, FLOAT8)
