"""The packed stream: what goes where, and attention within its rows."""

import math

import pytest
import torch
from torch import Tensor

from models.attention import Scheme, attend
from models.cache import KVCache
from models.stream import Stream, pack_sequences

CPU = torch.device("cpu")
# Attention of float32 values of about 1: over seeds 0-19 it is within 6.3e-7 of the plain one in float64.
CLOSE = 5e-6


def test_sequences_lie_one_after_the_other_without_their_last_tokens() -> None:
    stream = pack_sequences([[5, 6, 7], [8, 9], [1, 2, 3, 4]], [1, 1, 2], size=9, device=CPU, temperature=0.7)
    assert stream.tokens.tolist() == [5, 6, 8, 1, 2, 3, 0, 0, 0]
    assert stream.row.tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 3]
    assert stream.position.tolist() == [0, 1, 0, 0, 1, 2, 0, 1, 2]
    assert (stream.lengths, stream.filler, stream.size, stream.real) == ([2, 1, 3], 3, 9, 6)
    assert stream.score_at.tolist() == [0, 1, 2, 4, 5]  # where the token before each response token stands
    assert stream.targets is not None and stream.targets.tolist() == [6, 7, 9, 3, 4]
    assert stream.temperature == 0.7
    mask = stream.padding_mask()
    assert mask is not None and mask.tolist() == [[False] * 6 + [True] * 3]


def test_a_full_stream_has_no_filler_and_no_mask() -> None:
    stream = pack_sequences([[5, 6, 7]], [2], size=2, device=CPU)
    assert (stream.filler, stream.padding_mask()) == (0, None)
    assert stream.score_at.tolist() == [1]


def test_a_rank_with_nothing_left_brings_filler_that_asks_for_nothing() -> None:
    stream = pack_sequences([], [], size=4, device=CPU)
    assert stream.tokens.tolist() == [0] * 4
    assert (stream.real, stream.filler, stream.lengths) == (0, 4, [])
    assert stream.score_at.tolist() == [] and stream.score_at.dtype == torch.int64
    assert stream.targets is not None and stream.targets.tolist() == []


def test_parts_of_tensor_ranks_and_what_their_rows_are_called() -> None:
    """Nine tokens as three parts of three: rows 0-1 are of the first sequence, 2 of the second, 3-5 of the third, then
    filler."""
    names = [
        ["sample 7, token 0", "sample 7, token 1", "sample 4, token 0"],
        ["sample 11, token 0", "sample 11, token 1", "sample 11, token 2"],
        ["filler token 0", "filler token 1", "filler token 2"],
    ]
    sequences = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    for rank in range(3):
        stream = pack_sequences(sequences, [1, 1, 2], 9, CPU, samples=[7, 4, 11], part=(rank, 3))
        assert (stream.first, stream.size_here) == (3 * rank, 3)
        assert [stream.describe(row) for row in range(3)] == names[rank]
    whole = pack_sequences(sequences, [1, 1, 2], 9, CPU)
    assert (whole.first, whole.size_here) == (0, 9)
    assert whole.describe(4) == "sample 2, token 1"  # without names: which of the stream's sequences


@pytest.mark.parametrize(
    ("prompt", "size", "text"), [(1, 1, "a stream of 1 cannot hold 2"), (0, 9, "prompt"), (3, 9, "prompt")]
)
def test_what_cannot_be_packed_is_refused(prompt: int, size: int, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        pack_sequences([[5, 6, 7]], [prompt], size, CPU)


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence, head by head: [n, heads, d] x [n, groups, d] -> [n, heads * d]."""
    n, heads, _ = query.shape
    out = torch.empty_like(query)
    for head in range(heads):
        group = head // (heads // key.shape[1])
        scores = query[:, head] @ key[:, group].t() * scale
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        out[:, head] = scores.masked_fill(later, -math.inf).softmax(-1) @ value[:, group]
    return out.reshape(n, -1)


def qkv(seed: int, tokens: int, heads: int = 4, groups: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, n, size, generator=generator) for n in (heads, groups, groups)]


def stream_of(lengths: list[int], filler: int = 0) -> Stream:
    return pack_sequences([[1] * (n + 1) for n in lengths], [1] * len(lengths), sum(lengths) + filler, CPU)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize(
    ("lengths", "filler"),
    [([3, 1, 7, 2], 0), ([3, 1, 7, 2], 3), ([4, 4, 4], 0), ([4, 4], 4), ([1] * 5, 0), ([6], 0), ([2, 3], 9)],
)
def test_attention_stays_within_its_row(seed: int, scale: float | None, lengths: list[int], filler: int) -> None:
    stream = stream_of(lengths, filler)
    query, key, value = qkv(seed, stream.size)
    ours = attend(stream, 0, query, key, value, Scheme(scale))
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        wanted = plain(*(t[part].double() for t in (query, key, value)), 1 / math.sqrt(8) if scale is None else scale)  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(ours[part].double(), wanted, atol=CLOSE, rtol=0)
        start += n


def test_the_gradient_of_a_row_reaches_that_row_alone() -> None:
    stream = stream_of([3, 1, 4], filler=2)
    inputs = [t.requires_grad_() for t in qkv(0, 10)]
    attend(stream, 0, *inputs, Scheme())[4:8].square().sum().backward()  # pyright: ignore[reportCallIssue]
    for tensor in inputs:
        assert tensor.grad is not None
        touched = tensor.grad.abs().sum((1, 2)) > 0
        assert touched.tolist() == [False] * 4 + [True] * 4 + [False] * 2


def test_values_of_the_filler_reach_no_real_token() -> None:
    stream = stream_of([3, 5], filler=4)
    query, key, value = qkv(0, 12)
    before = attend(stream, 0, query, key, value, Scheme())[:8]
    for tensor in (query, key, value):
        tensor[8:] = 1e4
    assert torch.equal(attend(stream, 0, query, key, value, Scheme())[:8], before)


def step_of(rows: list[int], positions: list[int], filler: int, cache: KVCache) -> Stream:
    """One token a row: a decoding step."""
    tokens = torch.ones(len(rows) + filler, dtype=torch.int64)
    row = torch.tensor(rows + [len(rows)] * filler)
    position = torch.tensor(positions + list(range(filler)))
    return Stream(tokens, row, position, [1] * len(rows), filler, torch.arange(len(rows)), cache=cache)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("filler", [0, 3])
def test_decoding_with_a_cache_is_full_attention(seed: int, filler: int) -> None:
    """Prompts of 3, 1 and 5 tokens in one pass, then token by token to 9; the second row leaves after two steps."""
    prompts, total = [3, 1, 5], 9
    whole = [qkv(seed * 10 + i, total) for i in range(3)]
    wanted = [plain(*(t.double() for t in one), 1 / math.sqrt(8)) for one in whole]  # pyright: ignore[reportCallIssue]
    cache = KVCache(rows=3, length=total)
    stream = stream_of(prompts, filler)
    stream.cache = cache
    noise = qkv(99, filler)
    inputs = [torch.cat([*(one[i][:n] for one, n in zip(whole, prompts, strict=True)), noise[i]]) for i in range(3)]
    ours = attend(stream, 5, *inputs, Scheme())[: sum(prompts)].split(prompts)  # pyright: ignore[reportCallIssue]
    for i, part in enumerate(ours):
        torch.testing.assert_close(part.double(), wanted[i][: len(part)], atol=CLOSE, rtol=0)
    live, done = [0, 1, 2], list(prompts)
    for step in range(total):
        staying = [i for i in live if done[i] < total and not (i == 1 and step >= 2)]
        if staying != live:
            cache.keep([live.index(i) for i in staying])
            live = staying
        if not live:
            break
        stream = step_of(list(range(len(live))), [done[i] for i in live], filler, cache)
        inputs = [torch.cat([*(whole[i][j][done[i]][None] for i in live), noise[j]]) for j in range(3)]
        ours = attend(stream, 5, *inputs, Scheme())  # pyright: ignore[reportCallIssue]
        for row, i in enumerate(live):
            torch.testing.assert_close(ours[row].double(), wanted[i][done[i]], atol=CLOSE, rtol=0)
            done[i] += 1
    assert done == [9, 3, 9]


def test_layers_have_caches_of_their_own() -> None:
    cache = KVCache(rows=1, length=4)
    where = (torch.tensor([0]), torch.tensor([2]))
    first, second = torch.full((1, 1, 2), 7.0), torch.full((1, 1, 2), 8.0)
    cache.write(0, *where, first, first + 0.5)
    keys, values = cache.write(1, *where, second, second + 0.5)
    assert (keys[0, 0, 2].tolist(), values[0, 0, 2].tolist()) == ([8.0, 8.0], [8.5, 8.5])
    keys, values = cache.write(0, torch.tensor([0]), torch.tensor([3]), second, second)
    assert keys[0, 0].tolist() == [[0.0, 0.0], [0.0, 0.0], [7.0, 7.0], [8.0, 8.0]]
    assert values[0, 0, 2].tolist() == [7.5, 7.5]
