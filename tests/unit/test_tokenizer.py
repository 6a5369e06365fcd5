"""Bytes, Hugging Face directories, and vocabularies that a model can hold."""

import json
import re
import shutil
from pathlib import Path

import pytest

from moe_rl.tasks import ByteTokenizer, HFTokenizer, build_tokenizer, check_vocab
from parallel.errors import UsageError


def test_bytes_are_numbered_from_three() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 2, 259)
    assert tokenizer.encode("A\n") == [68, 13]
    assert tokenizer.encode_prompt("é") == tokenizer.encode("é") == [0xC3 + 3, 0xA9 + 3]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([1, 68, 0, 13, 2]) == "A\n"


@pytest.mark.parametrize("text", ["37+48=", "", "née 数字 🙂", "\x00\x7f"])
def test_bytes_round_trip(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_every_id_decodes_and_what_is_no_text_becomes_the_replacement_character() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xC3 + 3]) == "\N{REPLACEMENT CHARACTER}"  # half a character
    assert tokenizer.decode([68, 259, 68, 400]) == "A\N{REPLACEMENT CHARACTER}A\N{REPLACEMENT CHARACTER}"  # a padded vocabulary
    assert len({tokenizer.decode([i]) for i in range(3, 3 + 128)}) == 128
    assert tokenizer.encode("\ud800") == tokenizer.encode("?")
    with pytest.raises(ValueError, match="token id -1"):
        tokenizer.decode([-1])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word tokenizer with bos, eos and no pad; id 9 is its greatest though it has 7 entries."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("hf") / "words"
    vocab = {"<s>": 0, "</s>": 1, "?": 2, "a": 3, "b": 4, "c": 5, ".": 9}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="?").save_pretrained(path)
    return path


def test_a_hugging_face_directory(directory: Path) -> None:
    tokenizer = build_tokenizer(str(directory))
    assert (tokenizer.name, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.vocab_size) == ("words", 1, {1}, 10)
    assert tokenizer.encode("a b zz .") == [3, 4, 2, 9]
    assert tokenizer.encode_prompt("a b") == [0, 3, 4]
    assert tokenizer.encode("") == []
    assert tokenizer.encode_prompt("") == [0]
    assert tokenizer.decode([0, 3, 4, 9, 1]) == "a b ."
    assert tokenizer.decode([3, 77]) == "a"


def test_no_path_means_bytes() -> None:
    assert isinstance(build_tokenizer(None), ByteTokenizer)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"model.tokenizer={tmp_path / 'no'}: there is no such directory")):
        build_tokenizer(str(tmp_path / "no"))
    with pytest.raises(UsageError, match="there is no such directory"):
        build_tokenizer("some-org/some-model")  # a name on the hub is not looked up


def test_a_directory_without_a_usable_tokenizer_is_named(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        HFTokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "no such"}}')
    with pytest.raises(UsageError, match="cannot be loaded"):
        HFTokenizer(tmp_path)


def test_a_config_alone_is_no_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UsageError, match="has no vocabulary|cannot be loaded"):
        HFTokenizer(tmp_path)


@pytest.mark.parametrize("unknown", ["?", None])
def test_a_vocabulary_without_the_letter_a_and_without_a_token_for_the_unknown(tmp_path: Path, unknown: str | None) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "x": 1, "y": 2, "?": 3}, unk_token=unknown))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(tmp_path / "t")
    tokenizer = HFTokenizer(tmp_path / "t")
    assert tokenizer.encode_prompt("y x") == [0, 2, 1]  # what stands in front, not what closes a text
    if unknown:
        assert tokenizer.encode("a") == [3]
    else:
        with pytest.raises(UsageError, match=r"model.tokenizer=.*: cannot encode 'x a': "):
            tokenizer.encode("x a")


def test_a_tokenizer_may_have_no_end_or_take_it_from_the_generation_config(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = HFTokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (None, frozenset())
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [9, 5]}')
    tokenizer = HFTokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (9, {5, 9})


@pytest.mark.parametrize(
    ("text", "ids"), [('{"eos_token_id": 5}', {1, 5}), ('{"eos_token_id": null}', {1}), ('{"top_k": 20}', {1})]
)
def test_ends_of_the_generation_config_come_on_top(tmp_path: Path, directory: Path, text: str, ids: set[int]) -> None:
    path = shutil.copytree(directory, tmp_path / "copy")
    (path / "generation_config.json").write_text(text)
    tokenizer = HFTokenizer(path)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (1, ids)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{", "generation_config.json cannot be read: Expecting property name"),
        ('{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id=</s>: must be token ids"),
        ('{"eos_token_id": [1, -1]}', "eos_token_id=[1, -1]: must be token ids"),
    ],
)
def test_a_generation_config_that_is_none_is_named(tmp_path: Path, directory: Path, text: str, shown: str) -> None:
    path = shutil.copytree(directory, tmp_path / "copy")
    (path / "generation_config.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(shown)):
        HFTokenizer(path)


def test_a_model_needs_a_row_for_every_id() -> None:
    check_vocab(ByteTokenizer(), 259)
    check_vocab(ByteTokenizer(), 320)
    with pytest.raises(
        UsageError, match=re.escape("model.vocab_size=258: must be at least 259, the ids of the tokenizer bytes")
    ):
        check_vocab(ByteTokenizer(), 258)
