"""Rotary embedding by each token's own position, with the stretched frequencies that long-context models are trained with.

The frequencies are those of transformers' own functions, so that a checkpoint means the same here as there.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from models.config import ModelConfig
from models.layer_map import decoder_layers
from models.stream import Stream


class TokenRotary(RotaryEmbedding):
    """Replaces RotaryEmbedding's class in place.

    Megatron asks for a length and then for the angles of that length; here the stream itself is handed through as the
    "length", so that nothing has to be remembered between the two calls.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        return next(a for a in (*args, *kwargs.values()) if isinstance(a, Stream))

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _angles(self.inv_freq, max_seq_len)[:, None, None, :]  # [T, 1, 1, size]


class LatentRotary(TokenRotary):
    """As latent attention asks for it: its tensors have no batch dimension, and the factor on cosine and sine comes along."""

    factor: float

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _angles(self.inv_freq, max_seq_len)[:, None, :], self.factor  # [T, 1, size]


def _angles(frequencies: Tensor, stream: Stream) -> Tensor:
    angles = stream.position.to(frequencies.dtype)[:, None] * frequencies.to(stream.position.device)
    return torch.cat((angles, angles), dim=-1)


def frequencies(model: ModelConfig) -> tuple[Tensor, float]:
    """(angles a position [rotated size / 2], factor on cosine and sine), float32."""
    size = model.rope_head_dim if model.latent else int(model.head_dim * model.rope_fraction)
    if model.rope_scaling is None:
        return 1.0 / model.rope_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": model.rope_base, **model.rope_scaling}
    config: Any = PreTrainedConfig()
    config.rope_parameters, config.max_position_embeddings = parameters, model.max_positions
    config.head_dim, config.hidden_size, config.num_attention_heads = size, model.hidden, model.heads
    return ROPE_INIT_FUNCTIONS[model.rope_scaling["rope_type"]](config, torch.device("cpu"))


def install_rotary(module: Any, model: ModelConfig) -> None:
    """Gives every attention of a built model (one chunk) these positions."""
    angles, factor = frequencies(model)
    attentions = [layer.self_attention for _, layer in decoder_layers([module])]
    if not model.latent:
        module.rotary_pos_emb.__class__ = TokenRotary
        module.rotary_pos_emb.inv_freq = angles
        for attention in attentions:
            attention._yarn_concentration_factor = factor
        return
    for attention in attentions:
        attention.rotary_pos_emb.__class__ = LatentRotary
        attention.rotary_pos_emb.inv_freq, attention.rotary_pos_emb.factor = angles, factor
        # asked in the forward pass: whether the embedding returns that factor. While building, it would make tables
        attention.config.rope_type = "yarn"
