"""Stop texts: the token with which a response first holds one, whatever the tokenizer does to its bytes; and in the engine."""

import random
from collections.abc import Iterator, Sequence

import pytest

from moe_rl.rollouts.embedded import EmbeddedEngine
from moe_rl.rollouts.engine import Request
from moe_rl.rollouts.stopping import Decode, StopTexts, before_stop
from moe_rl.tasks import ByteTokenizer, HFTokenizer
from moe_rl.types import Sampling
from parallel.runtime import Runtime, started
from tests.chat_tokenizers import save_tokenizer
from tests.distributed.passes import Case, built


def ends_at(stops: Sequence[str], decode: Decode, tokens: Sequence[int]) -> int | None:
    """How many tokens the response has when it ends; None where it does not."""
    matcher = StopTexts(stops, decode)
    return next((n for n in range(1, len(tokens) + 1) if matcher.end(tokens[:n])), None)


def by_definition(stops: Sequence[str], decode: Decode, tokens: Sequence[int]) -> int | None:
    whole = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops))
    return next(whole, None)


WORDS = ["St", "op", "Stop", " here", "\n", "\n\nQ", "", "e", "xStopy"]


def decode_words(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("stops", "tokens", "count"),
    [
        (["Stop"], [7, 0, 1, 3], 3),  # across two tokens
        (["Stop"], [7, 8, 3], 2),  # within one
        (["Stop"], [0, *[6] * 40, 1], 42),  # with tokens between that have no text
        (["\n\n"], [7, 4, 4, 7], 3),
        (["\n\n"], [7, 5, 7], 2),
        (["p h"], [2, 3, 7], 2),
        (["Stop", "here"], [7, 3, 2], 2),
        (["Stop here"], [2, 2, 3], 3),
        (["Stop"], [0, 7, 1], None),
        (["Stop"], [6, 6], None),
    ],
)
def test_by_hand(stops: list[str], tokens: list[int], count: int | None) -> None:
    assert ends_at(stops, decode_words, tokens) == by_definition(stops, decode_words, tokens) == count


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Decode, int]]:
    """Decoders that treat bytes, leading spaces and special tokens differently, and their vocabularies."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("tokenizers")
    pieces = ["<s>", "\u2581", "\u2581a", "a", "b", "\u2581ab", "\n", *(f"<0x{byte:02X}>" for byte in "é終\n".encode())]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))  # as SentencePiece: spaces in the pieces, bytes as a fallback
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<s>").save_pretrained(root / "pieces")
    byte_level = HFTokenizer(save_tokenizer(root / "bytelevel"))
    return {
        "bytes": (ByteTokenizer().decode, 259),
        "byte level": (byte_level.decode, byte_level.vocab_size),
        "pieces": (HFTokenizer(root / "pieces").decode, len(vocab)),
    }


def test_runs_of_bytes_are_decoded_as_a_whole(decoders: dict[str, tuple[Decode, int]]) -> None:
    """Such a tokenizer makes nothing of a run of bytes that is not all UTF-8, so where one looks from matters."""
    decode, _ = decoders["pieces"]
    accented, end = [7, 8], [9, 10, 11]  # the bytes of é and of 終
    assert decode(accented) == "é" and decode(end) == "終"
    # the last six tokens, as far back as é can reach, begin within a 終
    assert ends_at(["é"], decode, [*end, *end, *end, *accented]) == 11
    # half a character long ago: the whole run is no text, though its end alone would be
    broken = [accented[0], *(end * 8)]
    assert ends_at(["終終終"], decode, broken) is by_definition(["終終終"], decode, broken) is None


@pytest.mark.parametrize("name", ["bytes", "byte level", "pieces"])
def test_random_responses_end_where_the_whole_text_first_holds_a_stop(
    decoders: dict[str, tuple[Decode, int]], name: str
) -> None:
    decode, size = decoders[name]
    rng = random.Random(name)
    ended = 0
    for _ in range(150):
        few = rng.sample(range(size), min(size, 6))
        if name == "bytes":
            few = [3 + byte for byte in rng.sample(list("é終a\n".encode()), 5)]
        tokens = [rng.choice(few) for _ in range(40)]
        text = decode(tokens).replace("\N{REPLACEMENT CHARACTER}", "")
        at = rng.randrange(max(1, len(text)))
        stops = [text[at : at + rng.randint(1, 4)] or "x", "a b"]
        count = by_definition(stops, decode, tokens)
        assert ends_at(stops, decode, tokens) == count, (tokens, stops)
        ended += count is not None and count > 8  # so far in that not all of it was looked at
    assert ended > 30


def test_text_before_the_first_stop() -> None:
    assert before_stop("one\n\ntwo STOP", ["STOP", "\n\n"]) == "one"
    assert before_stop("one two", ["three", "e t"]) == "on"
    assert before_stop("one", ["two"]) == before_stop("one", []) == "one"


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def test_the_engine_ends_a_response_with_the_token_that_completes_a_stop(runtime: Runtime) -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)

    requests = [Request([5, 6, 7], seed) for seed in range(8)]
    with built(Case(), runtime) as model:
        engine = EmbeddedEngine(model, 100, decode)
        free = engine.generate(requests, Sampling(30))
        stops = (decode(free[0].token_ids)[20:22], decode(free[1].token_ids)[4:7])
        stopped = engine.generate(requests, Sampling(30, stop=stops))
        for one, whole in zip(stopped, free, strict=True):
            count = by_definition(stops, decode, whole.token_ids)
            assert one.token_ids == whole.token_ids[:count] and one.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)
            assert one.finish_reason == ("length" if count is None else "stop")
        assert 2 <= len(stopped[0].token_ids) <= 22 and any(one.finish_reason == "length" for one in stopped)
        last = engine.generate(requests[:1], Sampling(len(stopped[0].token_ids), stop=stops))
        assert last[0].finish_reason == "stop"  # also where the limit is reached with it
        with pytest.raises(ValueError, match="Sampling.stop: this engine was made without a tokenizer's decode"):
            EmbeddedEngine(model, 100).generate(requests, Sampling(30, stop=stops))
