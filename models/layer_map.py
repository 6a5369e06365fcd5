"""Global layer numbers <-> the modules that live on this rank, under pipeline and virtual pipeline stages."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def decoder_layers(chunks: list[Any]) -> Iterator[tuple[int, Any]]:
    """(0-based model layer, module) of every decoder layer here, from the live tree; an MTP head is not among them."""
    for chunk in chunks:
        for module in chunk.decoder.layers:
            yield module.layer_number - 1, module


def moe_modules(chunks: list[Any]) -> list[tuple[int, Any]]:
    """(0-based model layer, module) of every layer here that routes, in order of layers."""
    return sorted(((i, m) for i, m in decoder_layers(chunks) if hasattr(m.mlp, "router")), key=lambda pair: pair[0])


def let_go_of_graphs(chunks: list[Any]) -> None:
    """After a pass. Megatron's dispatchers keep their last gates, and through autograd's graph the whole model: by way of C++,
    where Python's garbage collector sees no cycle, so that neither weights nor process groups would ever be freed."""
    for _, module in moe_modules(chunks):
        kept = vars(module.mlp.token_dispatcher)
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                kept[name] = value.detach()
