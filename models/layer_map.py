"""Global layer numbers <-> the modules that live on this rank, under pipeline and virtual pipeline stages."""

from collections.abc import Iterator
from typing import Any


def decoder_layers(chunks: list[Any]) -> Iterator[tuple[int, Any]]:
    """(0-based model layer, module) of every decoder layer here, from the live tree; an MTP head is not among them."""
    for chunk in chunks:
        for module in chunk.decoder.layers:
            yield module.layer_number - 1, module


def moe_modules(chunks: list[Any]) -> list[tuple[int, Any]]:
    """(0-based model layer, module) of every layer here that routes, in order of layers."""
    return sorted(((i, m) for i, m in decoder_layers(chunks) if hasattr(m.mlp, "router")), key=lambda pair: pair[0])
