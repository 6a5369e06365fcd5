"""Keys and values of the tokens that a generation has already seen."""

import torch
from torch import Tensor


class KVCache:
    """One buffer a layer, [2, rows, key/value heads, length, head size]. Rows are sequences; live ones stay at the front."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._buffers: dict[int, Tensor] = {}

    def write(self, layer: int, row: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [T, heads, size] at (row, position); returns the layer's whole keys and values."""
        if layer not in self._buffers:
            heads, size = keys.shape[1:]
            self._buffers[layer] = keys.new_zeros(2, self.rows, heads, self.length, size)
        buffer = self._buffers[layer]
        buffer[0, row, :, position] = keys
        buffer[1, row, :, position] = values
        return buffer[0], buffer[1]

    def keep(self, rows: list[int]) -> None:
        """Moves these rows, in this order, to the front; the others are free."""
        index = torch.tensor(rows, dtype=torch.int64)
        for buffer in self._buffers.values():
            buffer[:, : len(rows)] = buffer[:, index.to(buffer.device)]
