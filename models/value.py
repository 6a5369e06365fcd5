"""The value model (critic) of PPO on one rank: the policy's transformer with one number a token on top."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from models.config import ModelConfig
from models.model import MoEModel
from models.stream import Stream
from models.transformer import Transformer
from parallel.groups import Groups

# Values [len(score_at)] of one stream -> (this stream's share of the global loss, anything to hand back)
ValueLoss = Callable[[Tensor], tuple[Tensor, Any]]

_KEY = "value_head.weight"


class ValueHead(torch.nn.Module):
    """hidden . weight, in float32: bfloat16 would round a value of 1 to steps of 1/128. The same on every tensor rank.

    A vector [hidden], which `initialise` sets to 0: first values are 0. Without a bias: Adam moves hidden weights together
    far faster than it could move one number.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device, groups: Groups) -> None:
        super().__init__()
        self.groups = groups.collection
        self.weight = torch.nn.Parameter(torch.empty(hidden, dtype=dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N], float32."""
        return torch.mv(hidden.float(), self.weight.float())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """In a checkpoint it is no output layer, in whose place it stands: a policy's cannot be taken for it."""
        shards = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {}, sharded_offsets, tp_group=self.groups.tp, dp_cp_group=self.groups.dp_cp
        )
        shards[f"{prefix}weight"].key = _KEY
        return shards


class ValueModel(Transformer):
    """Values of the state before each response token: at Stream.score_at, in the order of the policy's log-probabilities.

    It lives on the policy's ranks and groups, with weights, routers and an optimizer of its own. Routes are never replayed
    in it. A pass overwrites Stream.routes with this model's choices: read a policy's routes before, or use other streams.
    """

    def __init__(self, config: ModelConfig, groups: Groups, device: torch.device, seed: int) -> None:
        # without an output layer there is nothing to tie: a tied policy's critic has an embedding alone
        super().__init__(config.model_copy(update={"tie_embeddings": False}), groups, device, seed)

    @torch.no_grad()
    def values(self, streams: Sequence[Stream]) -> list[Tensor]:
        """[len(score_at)] of each stream, float32, without gradients. On the last stage, else []."""
        losses: list[ValueLoss] = [lambda values: (values.sum(), values)] * len(streams)
        return self._run(streams, losses, 1, None, forward_only=True)

    def accumulate_gradients(self, streams: Sequence[Stream], losses: Sequence[ValueLoss], tokens: int) -> list[Any]:
        """Forward and backward of sum(losses); leaves reduced gradients for the optimizer. Results on the last stage, else [].

        tokens: as in MoEModel.accumulate_gradients.
        """
        return self._run(streams, losses, tokens, None, forward_only=False)

    @torch.no_grad()
    def copy_trunk(self, policy: MoEModel) -> None:
        """Takes over every weight and expert bias but the head's. The policy must have this one's shape and layout; an
        optimizer must be made afterwards, since it copies weights when it is made."""
        for mine, theirs in zip(self.bare, policy.bare, strict=True):
            source, target = _trunk(theirs), _trunk(mine)
            assert source.keys() == target.keys(), "the policy has other layers, or another layout"
            for name, tensor in target.items():
                tensor.copy_(source[name])

    def _build(self) -> list[Any]:
        chunks = super()._build()
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer = ValueHead(self.config.hidden, self.megatron_config.params_dtype, self.device, self.groups)
        return chunks

    def _head(self, stream: Stream) -> Callable[..., Any]:
        return self._values

    def _values(self, *, hidden_states: Tensor, output_layer: Any, context: Stream, **_: Any) -> Tensor:
        return output_layer(self._rows_asked_about(hidden_states, context, duplicated=True))


def _trunk(chunk: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name, in place, without what stands on top."""
    named = (*chunk.named_parameters(), *chunk.named_buffers())
    return {name: tensor for name, tensor in named if not name.startswith("output_layer.")}
