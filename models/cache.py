"""Keys and values of the tokens that a generation has already seen."""

import torch
from torch import Tensor


class KVCache:
    """Two buffers a layer, [rows, key/value heads, length, head size]. Rows are sequences; live ones stay at the front."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, row: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [T, heads, size] at (row, position); returns the layer's whole keys and values."""
        if layer not in self._buffers:
            self._buffers[layer] = self._empty(keys), self._empty(values)
        ours = self._buffers[layer]
        for buffer, new in zip(ours, (keys, values), strict=True):
            buffer[row, :, position] = new
        return ours

    def _empty(self, like: Tensor) -> Tensor:
        heads, size = like.shape[1:]
        return like.new_zeros(self.rows, heads, self.length, size)

    def keep(self, rows: list[int]) -> None:
        """Moves these rows, in this order, to the front; the others are free."""
        index = torch.tensor(rows, dtype=torch.int64)
        for pair in self._buffers.values():
            for buffer in pair:
                buffer[: len(rows)] = buffer[index.to(buffer.device)]
