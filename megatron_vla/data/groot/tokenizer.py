"""Byte-level BPE tokenizers (Qwen's), read from local files by the `tokenizers` package, which is imported on first use.

A tokenizer is held as the bytes of its tokenizer.json, so that it travels to workers and into checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_vla.data.groot.chat import IMAGE, PADDING, SPECIAL_TOKENS
from megatron_vla.findings import Finding, error

FILE_NAME = "tokenizer.json"
PARTS = ("vocab.json", "merges.txt", "tokenizer_config.json")
INSTALL_HINT = "pip install 'megatron-vla[groot]'"
CACHED_TEXTS = 4096  # instructions repeat from sample to sample
# Qwen's splitting rule: contractions, words with one leading mark, single digits, runs of marks, line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class BytePairTokenizer:
    """`encode` plain text, `token_id` of special tokens. Raises ValueError when the bytes are no tokenizer."""

    def __init__(self, model_bytes: bytes) -> None:
        self.model_bytes = model_bytes
        # Opened lazily: no pickle carries the library's object to a worker.
        self._tokenizer: Any = None
        self._known: dict[str, list[int]] = {}
        self.special_ids = {token: self.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    @property
    def tokenizer(self) -> Any:
        """The library's tokenizer, opened in this process on first use."""
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_str(self.model_bytes.decode())
            except Exception as problem:  # the library raises plain Exception
                raise ValueError(f"no tokenizer.json of a byte-level BPE tokenizer ({problem})") from problem
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None, "_known": {}}

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return max(self.tokenizer.get_vocab_size(with_added_tokens=True), 1 + max(self.tokenizer.get_vocab().values()))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        if text not in self._known:
            if len(self._known) >= CACHED_TEXTS:
                self._known.clear()
            self._known[text] = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return self._known[text]

    def token_id(self, token: str) -> int:
        """Id of a special token. Raises ValueError when the tokenizer has none of that name."""
        number = self.special_ids[token]
        if number is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return int(number)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; padding and image tokens vanish, the markers stay readable."""
        hidden = {self.special_ids[PADDING], self.special_ids[IMAGE]}
        return str(self.tokenizer.decode([int(i) for i in ids if int(i) not in hidden], skip_special_tokens=False))


def read_tokenizer(path: Path) -> BytePairTokenizer:
    """From a tokenizer.json, a folder with one, or a folder with vocab.json, merges.txt and tokenizer_config.json."""
    if path.is_file():
        return BytePairTokenizer(path.read_bytes())
    if (path / FILE_NAME).is_file():
        return BytePairTokenizer((path / FILE_NAME).read_bytes())
    absent = [name for name in PARTS if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} has neither {FILE_NAME} nor {', '.join(absent)}")
    return BytePairTokenizer(_joined(path))


def _joined(folder: Path) -> bytes:
    """tokenizer.json out of the three older files."""
    from tokenizers import AddedToken, Tokenizer, models

    vocabulary = json.loads((folder / "vocab.json").read_text())
    lines = [line for line in (folder / "merges.txt").read_text().split("\n") if line and not line.startswith("#version")]
    merges = [(first, second) for first, second in (line.split(" ") for line in lines)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    _byte_level(tokenizer)
    added = json.loads((folder / "tokenizer_config.json").read_text()).get("added_tokens_decoder", {})
    # In the order of their ids: the library numbers them as they come.
    tokenizer.add_tokens([AddedToken(**added[number]) for number in sorted(added, key=int)])
    wrong = [t["content"] for number, t in added.items() if tokenizer.token_to_id(t["content"]) != int(number)]
    if wrong:
        raise ValueError(f"{folder}: vocab.json and tokenizer_config.json do not fit together: {', '.join(wrong[:4])}")
    return str(tokenizer.to_str()).encode()


def _byte_level(tokenizer: Any) -> None:
    """Qwen's way from text to pieces and back."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def train_tokenizer_bytes(texts: Iterable[str], vocab_size: int) -> bytes:
    """tokenizer.json of a small tokenizer of the same kind, for models that start from nothing. Deterministic.

    The special tokens come first: padding is 0, the image token 5.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    _byte_level(tokenizer)
    # All bytes are in the vocabulary, so that no text is unknown.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(texts), trainer=trainer)
    return str(tokenizer.to_str()).encode()


def load_chat_tokenizer(
    path: str | None, vocab_size: int, image_token: int, padding_token: int
) -> tuple[BytePairTokenizer | None, list[Finding]]:
    """(the tokenizer, or None with errors). Local files only; the numbers are the model's own."""
    where = "--tokenizer-model"
    if path is None:
        what = "a tokenizer.json, or a folder with the tokenizer files of the backbone (Qwen3-VL)"
        return None, [error(where, "not given", f"give {what}; nothing is downloaded")]
    try:
        tokenizer = read_tokenizer(Path(path))
    except ModuleNotFoundError as problem:
        return None, [error(where, f"the package {problem.name} is not installed", INSTALL_HINT)]
    except (ValueError, OSError, UnicodeDecodeError) as problem:
        return None, [error(where, f"{path}: {problem}", "name the backbone's tokenizer.json or the folder that holds it")]
    findings = []
    absent = [token for token, number in tokenizer.special_ids.items() if number is None]
    if absent:
        findings.append(error(where, f"{path} has no {', '.join(absent)}", "use the backbone's own tokenizer files"))
    for flag, token, expected in (("--image-token", IMAGE, image_token), ("--padding-token", PADDING, padding_token)):
        if token not in absent and tokenizer.special_ids[token] != expected:
            found = tokenizer.special_ids[token]
            what = f"{path} numbers {token} {found}; the model's {flag} is {expected}"
            findings.append(error(where, what, f"use {flag} {found}, or the backbone's own tokenizer files"))
    if tokenizer.vocab_size > vocab_size:
        what = f"{path} has {tokenizer.vocab_size} tokens; --vocab-size is {vocab_size}"
        fix = f"use --vocab-size {tokenizer.vocab_size} or more (new rows start at random), or the backbone's own tokenizer"
        findings.append(error(where, what, fix))
    return (None if findings else tokenizer), findings
