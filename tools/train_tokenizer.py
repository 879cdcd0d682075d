"""Trains a small tokenizer on a dataset's own instructions, for users without the released model's tokenizer files.

    python tools/train_tokenizer.py --data-path outputs/demonstrations --output outputs/tokenizer.model
    python tools/train_tokenizer.py --data-path outputs/demonstrations --kind byte_pair --output outputs/tokenizer.json

sentencepiece (Pi0.5): knows the prompt's fixed words, every state bin (-1 ... 255, one or two tokens each), newline, and all
bytes, so that no text is unknown; control ids are PaliGemma's: pad 0, eos 1, bos 2, unk 3. byte_pair (GR00T): byte-level BPE as
Qwen's, padding 0, image token 5. The same instructions give the same file. Not interchangeable with released tokenizers: a
released checkpoint needs its own.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.datasets import split_data_path
from megatron_vla.data.groot.chat import IMAGE, PADDING, SPECIAL_TOKENS, formalized
from megatron_vla.data.groot.tokenizer import BytePairTokenizer, train_tokenizer_bytes
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.prompt import NUM_STATE_BINS, SentencePieceTokenizer, clean_instruction, state_prompt
from megatron_vla.data.rlds_features import is_rlds

# Prompts per instruction in the training text: enough that every " 128" is frequent enough to become a piece.
PROMPTS_PER_INSTRUCTION = 400
BINS_PER_PROMPT = 16
MIN_VOCABULARY = 3 + 1 + 256 + 1  # pad, eos, bos; unk; bytes; newline


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer: a small one for one dataset's instructions"""

    kind: Literal["sentencepiece", "byte_pair"] = "sentencepiece"
    """sentencepiece for Pi0.5, byte_pair for GR00T."""

    data_path: tuple[str, ...] = ()
    """Root folders of the datasets whose instructions are learned (required), as training takes them: [NAME=]FOLDER."""

    rlds_mapping: str | None = None
    """JSON file (or the JSON itself) with the rate and keys of RLDS datasets among them."""

    output: str = ""
    """File to write, for example tokenizer.model (required)."""

    vocab_size: int = 1024
    """Upper limit of the number of tokens; give the model's --vocab-size the same value."""


def training_text(instructions: Iterable[str]) -> list[str]:
    """Prompts that spell every state bin equally often, instruction by instruction. Deterministic."""
    texts: list[str] = []
    for text in sorted({clean_instruction(instruction) for instruction in instructions}):
        random = np.random.default_rng(len(texts))
        bins = random.permuted(np.tile(np.arange(-1, NUM_STATE_BINS), PROMPTS_PER_INSTRUCTION * BINS_PER_PROMPT // 256))
        # The middle of each bin on the scale on which the prompt discretizes.
        states = (bins + 0.5) / (NUM_STATE_BINS / 2) - 1.0
        texts += [state_prompt(text, states[i : i + BINS_PER_PROMPT]) for i in range(0, len(states), BINS_PER_PROMPT)]
    return texts


def train_tokenizer(instructions: Iterable[str], vocab_size: int) -> bytes:
    """Serialized SentencePiece model. Raises ValueError for no instruction or too small a vocabulary."""
    import sentencepiece

    texts = training_text(instructions)
    if not texts:
        raise ValueError("no instructions to learn from -> give a dataset whose episodes have task texts")
    if vocab_size < MIN_VOCABULARY + 64:
        raise ValueError(f"--vocab-size {vocab_size}: bytes and control tokens alone are {MIN_VOCABULARY} -> give 400 or more")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # A newline is its own symbol (as in PaliGemma's), so training sentences end there.
        sentence_iterator=iter([line for text in texts for line in text.split("\n")]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        byte_fallback=True,
        user_defined_symbols=["\n"],
        # The prompt's exact characters count: no case folding, no trimming of the space that ends it.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=False,
        split_by_number=False,
        character_coverage=1.0,
        num_threads=1,
        shuffle_input_sentence=False,
        minloglevel=2,
    )
    return model.getvalue()


def _train_byte_pair(texts: list[str], vocab_size: int, output: Path) -> BytePairTokenizer:
    if not texts:
        raise ValueError("no instructions to learn from -> give a dataset whose episodes have task texts")
    if vocab_size < 256 + len(SPECIAL_TOKENS) + 64:
        raise ValueError(f"--vocab-size {vocab_size}: bytes and special tokens need most of it -> give 400 or more")
    # Words as prompts have them, and the two that every chat turn has.
    model_bytes = train_tokenizer_bytes([*(formalized(text) for text in texts), *texts, "user\n"], vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(model_bytes)
    tokenizer = BytePairTokenizer(model_bytes)
    print(f"{output}: {tokenizer.vocab_size} tokens from {len(set(texts))} instruction(s)")
    numbers = f"--image-token {tokenizer.token_id(IMAGE)} --padding-token {tokenizer.token_id(PADDING)}"
    print(f"use it with {numbers} --vocab-size {tokenizer.vocab_size} or more")
    return tokenizer


def train_from_datasets(config: TokenizerConfig) -> SentencePieceTokenizer | BytePairTokenizer:
    """Train, write --output, and return the tokenizer. Raises ValueError for missing flags."""
    if not config.data_path or not config.output:
        raise ValueError("--data-path and --output are both needed")
    folders = [split_data_path(path)[1] for path in config.data_path]
    mappings = [config.rlds_mapping if is_rlds(Path(folder)) else None for folder in folders]
    instructions = [t for f, m in zip(folders, mappings, strict=True) for t in read_metadata(f, m)[0].instructions]
    texts = [text for text in instructions if text.strip()]
    output = Path(config.output)
    if config.kind == "byte_pair":
        return _train_byte_pair(texts, config.vocab_size, output)
    model_bytes = train_tokenizer(texts, config.vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(model_bytes)
    tokenizer = SentencePieceTokenizer(model_bytes)
    example = state_prompt(instructions[0], np.linspace(-1, 1, 4))
    print(f"{output}: {tokenizer.vocab_size} tokens from {len(set(instructions))} instruction(s)")
    print(f"example with a state of 4: {example!r} -> {1 + len(tokenizer.encode(example))} tokens with BOS")
    return tokenizer


def parse(arguments: Sequence[str]) -> TokenizerConfig:
    """Flags -> TokenizerConfig."""
    parser = StrictParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_section(parser, TokenizerConfig)
    config: TokenizerConfig = build_section(TokenizerConfig, parser.parse_flags(arguments))
    return config


if __name__ == "__main__":
    try:
        train_from_datasets(parse(sys.argv[1:]))
    except ValueError as failure:
        raise SystemExit(f"error: {failure}") from None
