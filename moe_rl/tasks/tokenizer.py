"""Text to token ids and back: bytes, or a Hugging Face tokenizer in a local directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from parallel.errors import UsageError


class Tokenizer(Protocol):
    """What the toolkit needs of a tokenizer. vocab_size: one more than its greatest id."""

    name: str
    vocab_size: int
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, without special tokens."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of `text` at the start of a sequence: behind the special tokens that the model was trained to see there."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens have none."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 3 to 258; pad 0, bos 1 (never added), eos 2."""

    name = "bytes"
    vocab_size = 259
    pad_id, bos_id, eos_id = 0, 1, 2
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


class HFTokenizer:
    """A tokenizer that transformers loads from a local directory; nothing is downloaded and no code of it is run.

    encode_prompt puts in front what the tokenizer itself does (Mixtral's bos). Ids that it does not know decode to nothing.
    Raises UsageError naming model.tokenizer where the directory, its vocabulary or the end-of-sequence token is missing.
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
        plain = self.encode("a")
        if not plain:  # transformers makes an empty tokenizer from a config.json alone
            raise UsageError(f"{where}: has no vocabulary; copy tokenizer.json and tokenizer_config.json there")
        if self._inner.eos_token_id is None:
            raise UsageError(f"{where}: has no end-of-sequence token; name one as eos_token in its tokenizer_config.json")
        self.name = Path(path).resolve().name
        self.vocab_size = max(self._inner.get_vocab().values()) + 1
        self.eos_id = int(self._inner.eos_token_id)
        self.pad_id = self.eos_id if self._inner.pad_token_id is None else int(self._inner.pad_token_id)
        marked = self._inner.encode("a")
        self._prefix = marked[: next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)]

    def encode(self, text: str) -> list[int]:
        valid = text.encode(errors="replace").decode()  # half a surrogate pair is no input for the Rust side
        return self._inner.encode(valid, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        return [*self._prefix, *self.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        text = self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


def build_tokenizer(path: str | None) -> Tokenizer:
    """model.tokenizer: a directory with a Hugging Face tokenizer, or None for bytes."""
    return ByteTokenizer() if path is None else HFTokenizer(path)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UsageError unless a model of `vocab_size` has a row for every id of the tokenizer."""
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size}: must be at least {tokenizer.vocab_size}, the ids of the tokenizer {tokenizer.name}"
        )
