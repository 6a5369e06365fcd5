"""Text to token ids and back: bytes, or a Hugging Face tokenizer in a local directory."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_rl.config_errors import show
from moe_rl.types import Message
from parallel.errors import UsageError


class Tokenizer(Protocol):
    """What the toolkit needs of a tokenizer: no padding token, since nothing is padded.

    vocab_size: one more than its greatest id. eos_id: what ends a text, None where it has nothing such; stop_ids: every id
    with which a model's response ends, eos_id among them. special_tokens: texts that stand for one id and that `decode` leaves
    out. chat_template: its source, None without one.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    stop_ids: frozenset[int]
    special_tokens: Mapping[str, int]
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, without special tokens."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of `text` at the start of a sequence: behind the special tokens that the model was trained to see there."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens have none."""
        ...

    def render(self, messages: Sequence[Message], generation: bool, options: Mapping[str, Any]) -> str:
        """The chat template's text of a conversation, whose ids `encode` gives; generation: with the beginning of a turn of
        the assistant. Needs a chat_template; raises what the template does."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 3 to 258; pad 0, bos 1 (never added), eos 2."""

    name = "bytes"
    vocab_size = 259
    pad_id, bos_id = 0, 1
    eos_id: int | None = 2
    stop_ids = frozenset([2])
    special_tokens: Mapping[str, int] = {}
    chat_template: str | None = None
    _first = 3

    def encode(self, text: str) -> list[int]:
        return [byte + self._first for byte in text.encode(errors="replace")]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8, and ids past 258 (a vocabulary may be padded), become U+FFFD. Raises ValueError for a
        negative id."""
        if ids and min(ids) < 0:
            raise ValueError(f"token id {min(ids)}: must be at least 0")
        unknown = "\N{REPLACEMENT CHARACTER}".encode()
        pieces = (bytes([i - self._first]) if i < self.vocab_size else unknown for i in ids if i >= self._first)
        return b"".join(pieces).decode(errors="replace")

    def render(self, messages: Sequence[Message], generation: bool, options: Mapping[str, Any]) -> str:
        raise NotImplementedError("bytes have no chat template")

    def save(self, directory: Path) -> None:
        """Writes the same tokenizer as a Hugging Face one."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = bytes_to_unicode()  # every byte as a printable letter, which is how byte-level tokenizers write them
        vocabulary = {"<pad>": self.pad_id, "<s>": self.bos_id, "</s>": self.eos_id}
        inner = Tokenizer(models.BPE(vocabulary | {letters[byte]: byte + self._first for byte in range(256)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
        inner.decoder = decoders.ByteLevel()  # pyright: ignore
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
        )
        tokenizer.save_pretrained(directory)


class HFTokenizer:
    """A tokenizer that transformers loads from a local directory; nothing is downloaded and no code of it is run.

    encode_prompt puts in front what the tokenizer itself does (Mixtral's bos). Ids that it does not know decode to nothing.
    stop_ids: its end of sequence and those in generation_config.json, of which chat models often list several. Raises
    UsageError naming model.tokenizer where the directory or its vocabulary is missing, or that file is none.
    """

    def __init__(self, path: str | Path) -> None:
        where = f"model.tokenizer={path}"
        if not Path(path).is_dir():
            raise UsageError(f"{where}: there is no such directory; give one with tokenizer.json and tokenizer_config.json")
        from transformers import AutoTokenizer  # imports torch: half a second or more

        try:
            self._inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the Rust side raises bare Exception for a file that it cannot read
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{where}: cannot be loaded: {type(error).__name__}: {reason}") from error
        self._where = where
        self._prefix = self._find_prefix()
        self.name = Path(path).resolve().name
        self.vocab_size = max(self._inner.get_vocab().values()) + 1
        ends = [] if self._inner.eos_token_id is None else [int(self._inner.eos_token_id)]
        ends += _generation_ends(Path(path), where)
        self.eos_id = ends[0] if ends else None
        self.stop_ids = frozenset(ends)
        added = self._inner.added_tokens_decoder
        self.special_tokens: Mapping[str, int] = {token.content: number for number, token in added.items() if token.special}
        template = self._inner.chat_template
        self.chat_template = "\n".join(template.values()) if isinstance(template, dict) else template

    def _find_prefix(self) -> list[int]:
        """The ids in front of any text, as they stand around the first one that the vocabulary has an id for."""
        special = set(self._inner.all_special_ids)
        others = (self._inner.decode([i]) for i in sorted(self._inner.get_vocab().values()) if i not in special)
        for text in itertools.chain(["a"], itertools.islice(others, 1000)):
            try:
                plain, marked = self._inner.encode(text, add_special_tokens=False), self._inner.encode(text)
            except Exception:  # the Rust side's way to say that it has no token for this one
                continue
            if plain:
                return marked[: next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)]
        # transformers makes an empty tokenizer from a config.json alone
        raise UsageError(f"{self._where}: has no vocabulary; copy tokenizer.json and tokenizer_config.json there")

    def encode(self, text: str) -> list[int]:
        valid = text.encode(errors="replace").decode()  # half a surrogate pair is no input for the Rust side
        try:
            return self._inner.encode(valid, add_special_tokens=False)
        except Exception as error:  # bare Exception from the Rust side: a word that is not in the vocabulary
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{self._where}: cannot encode {show(repr(text))}: {reason}") from error

    def encode_prompt(self, text: str) -> list[int]:
        return [*self._prefix, *self.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        text = self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)

    def render(self, messages: Sequence[Message], generation: bool, options: Mapping[str, Any]) -> str:
        turns = [dict(message) for message in messages]
        text = self._inner.apply_chat_template(turns, add_generation_prompt=generation, tokenize=False, **options)
        assert isinstance(text, str)
        return text


def _generation_ends(path: Path, where: str) -> list[int]:
    """The ids in generation_config.json, where that file is there: one, a list or none."""
    file = path / "generation_config.json"
    if not file.exists():
        return []
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: generation_config.json cannot be read: {' '.join(str(error).split())[:200]}") from error
    found = settings.get("eos_token_id") if isinstance(settings, dict) else settings
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise UsageError(f"{where}: generation_config.json: eos_token_id={show(found)}: must be token ids")
    return ids


def build_tokenizer(path: str | None) -> Tokenizer:
    """model.tokenizer: a directory with a Hugging Face tokenizer; "bytes", or None, for the built-in one."""
    return ByteTokenizer() if path in (None, ByteTokenizer.name) else HFTokenizer(path)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UsageError unless a model of `vocab_size` has a row for every id of the tokenizer."""
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size}: must be at least {tokenizer.vocab_size}, the ids of the tokenizer {tokenizer.name}"
        )
