"""The rollout engine that is the trained Megatron model itself: batched sampling with a KV cache, in every layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from models.cache import KVCache
from models.model import MoEModel
from models.routes import UNKNOWN, compact
from models.stream import FILLER_TOKEN, Stream
from moe_rl.rollouts.engine import Request
from moe_rl.rollouts.sampling import draw
from moe_rl.rollouts.stopping import Decode, StopTexts
from moe_rl.types import FinishReason, Response, Sampling


class EmbeddedEngine:
    """An Engine over `model`. All prompts enter in one pass, then one token a live sequence; finished ones leave the stream."""

    def __init__(
        self,
        model: MoEModel,
        max_batch: int,
        decode: Decode | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """max_batch: sequences that generate at once on one data-parallel rank; bounds the cache. decode: the tokenizer's,
        which Sampling.stop needs. progress: told of every batch of tokens."""
        self.model, self.max_batch, self._decode, self._progress = model, max_batch, decode, progress

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, routes: bool = True) -> list[Response]:
        stops = None
        if sampling.stop:
            if self._decode is None:
                raise ValueError("Sampling.stop: this engine was made without a tokenizer's decode")
            stops = StopTexts(sampling.stop, self._decode)
        batches = torch.tensor(-(-len(requests) // self.max_batch), device=self.model.device)
        dist.all_reduce(batches, dist.ReduceOp.MAX)
        responses: list[Response] = []
        with self.model.generating():
            for i in range(int(batches)):
                part = requests[i * self.max_batch : (i + 1) * self.max_batch]
                responses += _Generation(self.model, part, sampling, stops, routes).run(self._progress)
        return responses


@dataclass
class _Sequence:
    """One request on its way."""

    tokens: list[int]
    prompt: int
    uniforms: Tensor
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason = "length"

    @property
    def drawn(self) -> int:
        return len(self.logprobs)


class _Generation:
    """One batch from prompts to responses. `live[i]` is the sequence in cache row i."""

    def __init__(
        self, model: MoEModel, requests: Sequence[Request], sampling: Sampling, stops: StopTexts | None, routes: bool
    ) -> None:
        self.model, self.groups, self.sampling, self.stops = model, model.groups, sampling, stops
        self.sequences = [
            _Sequence(list(r.prompt_ids), len(r.prompt_ids), _uniforms(r.seed, sampling.max_tokens)) for r in requests
        ]
        self.live = list(range(len(requests)))
        longest = max((s.prompt for s in self.sequences), default=1) + sampling.max_tokens
        self.cache = KVCache(rows=len(requests), length=longest)
        self.routes = self._empty_routes(longest) if routes else None

    def run(self, progress: Callable[[str], None] | None) -> list[Response]:
        feed = [s.tokens for s in self.sequences]
        prefill = True
        while size := self._size(sum(map(len, feed))):
            stream = self._stream(feed, size, prefill)
            if progress is not None:
                progress("rollout")
            logits = self.model.next_token_logits(stream)
            self._note_routes(stream)
            self._sample(logits)
            self._retire()
            feed, prefill = [self.sequences[i].tokens[-1:] for i in self.live], False
        return self._responses()

    def _size(self, wanted: int) -> int:
        """Tokens that this rank feeds: filled up to a multiple of the tensor group; 0 only when nobody has work left.

        The ranks that exchange tokens keep in step: one without work feeds filler."""
        most = torch.tensor(wanted, device=self.model.device)
        if self.groups.dispatch.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.groups.dispatch.group)
        equal = self.groups.parallel.dispatcher == "allgather"
        size = int(most) if equal else max(wanted, min(1, int(most)))
        return -(-size // self.groups.tensor.size) * self.groups.tensor.size

    def _stream(self, feed: list[list[int]], size: int, prefill: bool) -> Stream:
        lengths = [len(tokens) for tokens in feed]
        real = sum(lengths)
        filler = size - real
        tokens = [t for part in feed for t in part] + [FILLER_TOKEN] * filler
        row = [i for i, n in enumerate(lengths) for _ in range(n)]
        first = [0 if prefill else len(self.sequences[i].tokens) - 1 for i in self.live]
        position = [start + j for start, n in zip(first, lengths, strict=True) for j in range(n)]
        row, position = row + [len(feed)] * filler, position + list(range(filler))
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
        device = self.model.device
        return Stream(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            row=torch.tensor(row, dtype=torch.int64, device=device),
            position=torch.tensor(position, dtype=torch.int64, device=device),
            lengths=lengths,
            filler=filler,
            score_at=ends.to(device),
            cache=self.cache,
        )

    def _sample(self, logits: Tensor | None) -> None:
        drawn = torch.zeros(2, len(self.live), dtype=torch.float64, device=self.model.device)
        if not self.live:
            return
        if logits is not None:
            waiting = [self.sequences[i] for i in self.live]
            uniforms = torch.stack([s.uniforms[s.drawn] for s in waiting]).to(self.model.device)
            drawn[0], drawn[1] = draw(logits[:, : self.model.config.vocab_size], uniforms, self.sampling)
        if self.groups.model.size > 1:
            dist.broadcast(drawn, self.groups.last_stage_main, group=self.groups.model.group)
        for i, token, logprob in zip(self.live, drawn[0].long().tolist(), drawn[1].tolist(), strict=True):
            self.sequences[i].tokens.append(token)
            self.sequences[i].logprobs.append(logprob)

    def _retire(self) -> None:
        keep = []
        for row, i in enumerate(self.live):
            sequence = self.sequences[i]
            if sequence.tokens[-1] in self.sampling.stop_token_ids:
                sequence.finish = "stop"
            elif self.stops is not None and self.stops.end(sequence.tokens[sequence.prompt :]):
                sequence.finish = "stop"
            elif sequence.drawn < self.sampling.max_tokens:
                keep.append(row)
        if len(keep) < len(self.live):
            self.cache.keep(keep)
            self.live = [self.live[row] for row in keep]

    def _empty_routes(self, longest: int) -> Tensor:
        config = self.model.config
        shape = (len(self.sequences), longest, len(self.model.moe_layers), config.topk)
        return torch.full(shape, UNKNOWN, dtype=torch.int16, device=self.model.device)

    def _note_routes(self, stream: Stream) -> None:
        """Writes this rank's part: its tensor rank's tokens."""
        if self.routes is None or not self.live or not self.model.moe_layers:
            return
        assert stream.routes is not None
        part = stream.size // self.groups.tensor.size
        start = part * self.groups.tensor.rank
        end = min(stream.real, start + part)
        if end <= start:
            return
        chosen = stream.routes.stacked(self.model.moe_layers)[: end - start]
        owner = torch.tensor(self.live, device=self.model.device)[stream.row[start:end]]
        self.routes[owner, stream.position[start:end]] = chosen.to(self.routes.dtype)

    def _responses(self) -> list[Response]:
        routes = self.routes
        if routes is not None and self.groups.tensor.size > 1 and routes.numel():
            whole = routes.int()  # gloo adds no int16
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=self.groups.tensor.group)  # one rank knows each entry
            routes = whole
        return [
            Response(
                token_ids=s.tokens[s.prompt :],
                logprobs=s.logprobs,
                finish_reason=s.finish,
                routes=None if routes is None else compact(routes[i, : len(s.tokens) - 1], self.model.config.experts).cpu(),
            )
            for i, s in enumerate(self.sequences)
        ]


def _uniforms(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
