"""A minibatch's sequences as streams: this data-parallel rank's share, cut by a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.model import MoEModel
from models.stream import Stream, pack_sequences
from moe_rl.batching import assign_to_ranks, pack


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


def cut(
    model: MoEModel, sequences: Sequence[Scored], places: Sequence[int], budget: int, temperature: float = 1.0
) -> list[Microbatch]:
    """The share of `places` (into `sequences`) that falls to this data-parallel rank (collective).

    Every rank gets equally many microbatches; some may hold filler alone.
    """
    data = model.groups.data
    share = assign_to_ranks([sequences[i].entering for i in places], data.size)[data.rank]
    mine = [places[i] for i in share]
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
