"""The frozen reference policy: its weights in memory, swapped in for a scoring pass; not a second model."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from models.model import MoEModel


class Reference:
    """The weights (and expert biases) that `model` has when this is made.

    on_cpu: they lie in host memory, and cross over for each scoring pass and back; else beside the model's own.
    """

    def __init__(self, model: MoEModel, *, on_cpu: bool = False) -> None:
        self._model = model
        self._weights = [tensor.to("cpu" if on_cpu else tensor.device, copy=True) for tensor in _tensors(model)]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the reference within the block; afterwards it is what it was, to the bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for live, kept in zip(_tensors(self._model), self._weights, strict=True):
            other = live.to(kept.device, copy=True)
            live.copy_(kept)
            kept.copy_(other)


def _tensors(model: MoEModel) -> list[Tensor]:
    return [t.detach() for chunk in model.bare for t in (*chunk.parameters(), *chunk.buffers())]
