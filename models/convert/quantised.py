"""Presents quantised weights as the bfloat16 tensors that they stand for, a part at a time.

MXFP4, of GPT-OSS (transformers/integrations/mxfp4.py): NAME_blocks holds two 4-bit floats a byte, the low half first, and
NAME_scales a power of two for each 32 of them (OCP Microscaling Formats 1.0). float8, of DeepSeek-V3 and Qwen3 (transformers/
integrations/finegrained_fp8.py): NAME holds 8-bit floats and NAME_scale_inv a factor for each block of 128 x 128.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from models.convert.storage import Index, Kind, Source, Stored, ranges
from parallel.errors import UsageError

_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"
_GROUP = 32  # 4-bit floats that share a scale
_ROWS = 1024  # of a float8 matrix are expanded at a time

# The floats of one sign bit, two of exponent and one of mantissa, by their bits; then the two that each byte holds
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1)

_Read = Callable[[list[range]], Tensor]  # what to take of each dimension -> that part


class Dequantised:
    """A source whose quantised tensors appear as bfloat16 under their plain names, and the others as they are.

    quantization_config: that of config.json.
    Raises UsageError for other ways of quantising, and where scales are missing or do not fit.
    """

    def __init__(self, source: Source, quantization_config: Mapping[str, Any]) -> None:
        self._source = source
        self._readers: dict[str, _Read] = {}
        method = quantization_config.get("quant_method")
        if method == "mxfp4":
            self.names: Mapping[str, Stored] = self._mxfp4()
        elif method == "fp8":
            self.names = self._float8(_block_size(quantization_config))
        else:
            raise UsageError(
                f"quantization_config.quant_method={method}: must be mxfp4 or fp8; bring weights that are not quantised"
            )

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor, or `tensor[index]`; of a quantised one no more is read than the blocks that hold it."""
        if name not in self._readers:
            return self._source.read(name, index)
        return self._readers[name](ranges(index, self.names[name].shape))

    def _mxfp4(self) -> dict[str, Stored]:
        """[experts, rows, groups, 16] and [experts, rows, groups] stand for [experts, groups * 32, rows]."""
        found: dict[str, Stored] = {}
        stored = self._source.names
        for name, kind in stored.items():
            plain = name.removesuffix(_BLOCKS)
            if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in stored:
                continue
            if plain == name:
                found[name] = kind
                continue
            scales = stored.get(plain + _SCALES)
            fits = len(kind.shape) == 4 and kind.shape[-1] == _GROUP // 2 and kind.dtype == torch.uint8
            if not fits or scales is None or (scales.dtype, scales.shape) != (torch.uint8, kind.shape[:3]):
                raise UsageError(
                    f"tensor {name}: {_said(kind)} with {plain + _SCALES}: {_said(scales)}; must be uint8 [experts, rows, "
                    "groups, 16] and [experts, rows, groups]; fetch the weights again"
                )
            experts, rows, groups, _ = kind.shape
            found[plain] = Kind(torch.bfloat16, (experts, groups * _GROUP, rows))
            self._readers[plain] = lambda cut, plain=plain: self._read_mxfp4(plain, *cut)
        return found

    def _read_mxfp4(self, name: str, experts: range, columns: range, rows: range) -> Tensor:
        result = torch.empty(len(experts), len(columns), len(rows), dtype=torch.bfloat16)
        if not result.numel():
            return result
        first = columns[0] // _GROUP
        groups = slice(first, columns[-1] // _GROUP + 1)
        inside = slice(columns[0] - first * _GROUP, columns[-1] + 1 - first * _GROUP, columns.step)
        for i, expert in enumerate(experts):
            index = (slice(expert, expert + 1), _slice(rows), groups)
            blocks = self._source.read(name + _BLOCKS, index)[0]
            scales = self._source.read(name + _SCALES, index)[0]
            values = _PAIRS.to(torch.bfloat16)[blocks.int()].flatten(-2)  # [rows, groups, 32]
            values = torch.ldexp(values, scales[..., None].int() - 127)
            result[i] = values.flatten(-2)[:, inside].T
        return result

    def _float8(self, block: tuple[int, int]) -> dict[str, Stored]:
        """[rows, columns] and [rows / block, columns / block], both rounded up."""
        found: dict[str, Stored] = {}
        stored = self._source.names
        for name, kind in stored.items():
            if name.endswith(_SCALE_INV) and name.removesuffix(_SCALE_INV) in stored:
                continue
            scales = stored.get(name + _SCALE_INV)
            if scales is None and kind.dtype.itemsize > 1:
                found[name] = kind
                continue
            wanted = tuple(-(-size // length) for size, length in zip(kind.shape, block, strict=False))
            if len(kind.shape) != 2 or not kind.dtype.is_floating_point or scales is None or scales.shape != wanted:
                raise UsageError(
                    f"tensor {name}: {_said(kind)} with {name + _SCALE_INV}: {_said(scales)}; must be a float8 matrix and its "
                    f"scales, one for each {block[0]} x {block[1]}; fetch the weights again"
                )
            found[name] = Kind(torch.bfloat16, kind.shape)
            self._readers[name] = lambda cut, name=name: self._read_float8(name, block, *cut)
        return found

    def _read_float8(self, name: str, block: tuple[int, int], rows: range, columns: range) -> Tensor:
        result = torch.empty(len(rows), len(columns), dtype=torch.bfloat16)
        if not result.numel():
            return result
        of_rows, of_columns = (torch.tensor(part) // size for part, size in zip((rows, columns), block, strict=True))
        corner = tuple(slice(int(part[0]), int(part[-1]) + 1) for part in (of_rows, of_columns))
        scales = self._source.read(name + _SCALE_INV, corner).float()[:, of_columns - of_columns[0]]
        for start in range(0, len(rows), _ROWS):
            some = slice(start, start + _ROWS)
            values = self._source.read(name, (_slice(rows[some]), _slice(columns))).float()
            result[some] = values.mul_(scales[of_rows[some] - of_rows[0]])
        return result


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    match config.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise UsageError(
                f"quantization_config.weight_block_size={other}: must be two sizes, such as [128, 128]; bring weights that are "
                "quantised in blocks, or not at all"
            )


def _slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)


def _said(kind: Stored | None) -> str:
    return "absent" if kind is None else f"{str(kind.dtype).removeprefix('torch.')} {list(kind.shape)}"
