"""The one batch format: a packed stream of real tokens, `[1, T]`, with a row and a position for each token.

Sequences lie one after the other, without padding between them. What fills the stream up (to a multiple of the tensor
group, to equal lengths where the dispatcher demands them, or a rank that has nothing left) stands at its end, is counted
in `filler`, and is dropped at the edge: it is in no row that is read, and load counts and aux losses mask it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

if TYPE_CHECKING:
    from models.cache import KVCache
    from models.routing import RouteLog

FILLER_TOKEN = 0


class Stream(PackedSeqParams):
    """Tokens for one forward pass. Megatron hands it, as `packed_seq_params`, to rotary embedding, layers and attention.

    qkv_format stays "sbhd", so that Megatron itself treats the stream as one long sequence; only the modules of
    `torch_layers` and `te_layers` look at what is inside. Identity of a microbatch is identity of this object, also in
    the recomputation of the backward pass.

    tokens, row, position: Int[T], filler included. lengths: tokens of each sequence that enter in this pass.
    score_at: positions in the stream whose next-token distribution is asked for; targets: the tokens asked about.
    cache: keys and values of earlier passes (generation), else None. routes: the log of the pass that is on (or was last).
    observe: this tensor rank's rows, counted within its part, whose selection scores the log keeps; None: no row.
    samples: what each sequence is called in an error, such as its place in the rollout batch; part: this tensor rank's place
    and the group's size.
    """

    def __init__(
        self,
        tokens: Tensor,
        row: Tensor,
        position: Tensor,
        lengths: list[int],
        filler: int,
        score_at: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        cache: "KVCache | None" = None,
        samples: Sequence[int] = (),
        part: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(qkv_format="sbhd")
        self.tokens, self.row, self.position = tokens, row, position
        self.lengths, self.filler = lengths, filler
        self.score_at, self.targets, self.temperature = score_at, targets, temperature
        self.cache, self.samples, self.part = cache, samples, part
        self.routes: RouteLog | None = None
        self.observe: Tensor | None = None

    @property
    def size(self) -> int:
        """T, filler included."""
        return len(self.tokens)

    @property
    def real(self) -> int:
        return self.size - self.filler

    @property
    def first(self) -> int:
        """Where this tensor rank's part of the tokens begins."""
        return self.part[0] * (self.size // self.part[1])

    @property
    def size_here(self) -> int:
        """Tokens of this tensor rank's part, filler included."""
        return self.size // self.part[1]

    @property
    def real_here(self) -> int:
        """Tokens of this tensor rank's part that are no filler: its first ones."""
        return max(0, min(self.real - self.first, self.size_here))

    def describe(self, row: int) -> str:
        """A row of this tensor rank's part, for an error."""
        at = self.first + row
        if at >= self.real:
            return f"filler token {at - self.real}"
        sequence = int(self.row[at])
        name = self.samples[sequence] if self.samples else sequence
        return f"sample {name}, token {int(self.position[at])}"

    def padding_mask(self) -> Tensor | None:
        """[1, T], True on filler (Megatron 0.19.2's code reads True as padding, whatever its docstring says)."""
        if not self.filler:
            return None
        mask = torch.zeros(1, self.size, dtype=torch.bool, device=self.tokens.device)
        mask[:, self.real :] = True
        return mask


def pack_sequences(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    size: int,
    device: torch.device,
    temperature: float = 1.0,
    *,
    samples: Sequence[int] = (),
    part: tuple[int, int] = (0, 1),
) -> Stream:
    """Sequences (prompt and response) to be scored: the last token of each is only a target and does not enter.

    size: T to fill up to, at least the tokens that enter. Every response token is scored, in order of the sequences.
    samples and part: see Stream.
    """
    lengths = [len(s) - 1 for s in sequences]
    real = sum(lengths)
    assert size >= real, f"a stream of {size} cannot hold {real} tokens"
    tokens, row, position, score_at, targets = [], [], [], [], []
    for i, (sequence, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        assert 0 < prompt < len(sequence), "a scored sequence has a prompt and a response"
        start = len(tokens)
        score_at.extend(range(start + prompt - 1, start + lengths[i]))
        targets.extend(sequence[prompt:])
        tokens.extend(sequence[:-1])
        row.extend([i] * lengths[i])
        position.extend(range(lengths[i]))
    filler = size - real
    tokens.extend([FILLER_TOKEN] * filler)
    row.extend([len(sequences)] * filler)
    position.extend(range(filler))
    ints = lambda values: torch.tensor(values, dtype=torch.int64, device=device)  # noqa: E731
    return Stream(
        ints(tokens),
        ints(row),
        ints(position),
        lengths,
        filler,
        ints(score_at),
        ints(targets),
        temperature=temperature,
        samples=samples,
        part=part,
    )
