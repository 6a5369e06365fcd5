"""A minibatch's sequences as streams: this data-parallel rank's share, cut by a token budget; and what its loss needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models.model import MoEModel
from models.routing import Replay
from models.stream import Stream, pack_sequences
from moe_rl.algorithms.base import Denominators
from moe_rl.batching import assign_to_ranks, pack
from moe_rl.drift.observe import PassRecord


@dataclass(frozen=True)
class Scored:
    """A sequence of which the tokens after the prompt are to be scored."""

    prompt_ids: list[int]
    response_ids: list[int]

    @property
    def entering(self) -> int:
        """Tokens that enter the model: the last is only a target."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass(frozen=True)
class Microbatch:
    """members: places of its sequences in the list that was cut; none where this rank only keeps the others company."""

    members: list[int]
    stream: Stream


@dataclass
class Prepared:
    """A microbatch with what its loss needs beside the live log-probabilities. T its response tokens, B its sequences."""

    microbatch: Microbatch
    sequence: Tensor  # [T], which of the B
    rollout_logprobs: Tensor  # [T]
    advantages: Tensor  # [T]; where they differ within a sequence, on the last stage alone
    old_logprobs: Tensor | None = None  # [T], on the last stage, as what follows
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None  # of the correction between engine and trainer
    log_router_shift: Tensor | None = None  # of the weights before this update
    old_values: Tensor | None = None  # of the critic before the step's updates
    returns: Tensor | None = None  # that it learns
    rollout_routes: Tensor | None = None  # [T / tensor, L here, K]; where the engine recorded them
    old: PassRecord | None = None
    replay: Replay | None = None  # what the update must choose
    train_logprobs: Tensor | None = None  # [T] of the last update, on the last stage
    new: PassRecord | None = None  # its routers


@dataclass
class Minibatch:
    """What one optimizer step sees of this rank's share. places: of all its sequences in the rollout batch, on all ranks.
    tokens: that enter the model, on all data-parallel ranks."""

    places: list[int]
    parts: list[Prepared]
    denominators: Denominators
    tokens: int

    @property
    def streams(self) -> list[Stream]:
        return [part.microbatch.stream for part in self.parts]


def cut(
    model: MoEModel, sequences: Sequence[Scored], places: Sequence[int], budget: int, temperature: float = 1.0
) -> list[Microbatch]:
    """The share of `places` (into `sequences`) that falls to this data-parallel rank (collective).

    Every rank gets equally many microbatches; some may hold filler alone.
    """
    data = model.groups.data
    share = assign_to_ranks([sequences[i].entering for i in places], data.size)[data.rank]
    return pack_here(model, sequences, [places[i] for i in share], budget, temperature)


def pack_here(
    model: MoEModel, sequences: Sequence[Scored], mine: Sequence[int], budget: int, temperature: float = 1.0
) -> list[Microbatch]:
    """The sequences `mine`, wherever a rank has its own from, cut by the budget; otherwise as `cut`."""
    packs = [[mine[i] for i in part] for part in pack([sequences[i].entering for i in mine], budget)]
    packs += [[] for _ in range(model.microbatch_count(len(packs)) - len(packs))]
    sizes = model.stream_sizes([sum(sequences[i].entering for i in part) for part in packs])
    return [
        Microbatch(
            part,
            pack_sequences(
                [sequences[i].prompt_ids + sequences[i].response_ids for i in part],
                [len(sequences[i].prompt_ids) for i in part],
                size,
                model.device,
                temperature,
                samples=part,
                part=(model.groups.tensor.rank, model.groups.tensor.size),
            ),
        )
        for part, size in zip(packs, sizes, strict=True)
    ]
