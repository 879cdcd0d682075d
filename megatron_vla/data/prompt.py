"""Prompt: task text and discretized state -> the exact string -> token ids.

Source: Pi0.5 as in openpi (PaliGemma tokenizer: BOS in front, no EOS, id 0 padding on the right, 256 state bins).

Shape legend: D state dimensions, L prompt slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_vla.findings import Finding, error, warning

NUM_STATE_BINS = 256
BIN_EDGES = np.linspace(-1.0, 1.0, NUM_STATE_BINS + 1)[:-1]  # float64: comparing in float32 moves values at the edges
PAD_ID = 0


def discretize_state(state_D: np.ndarray) -> np.ndarray:
    """int64 [D] bins of a normalized state: -1 below -1, 0 ... 255 from there, 255 also above 1."""
    return np.digitize(np.asarray(state_D, dtype=np.float64), BIN_EDGES) - 1


def clean_instruction(instruction: str) -> str:
    """Outer white space off, then underscore and newline become a space each; case is kept."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def state_prompt(instruction: str, state_D: np.ndarray) -> str:
    """The prompt with the discretized state; ends with one space."""
    return _binned_prompt(instruction, discretize_state(state_D).tolist())


def _binned_prompt(instruction: str, bins: Iterable[int]) -> str:
    return f"Task: {clean_instruction(instruction)}, State: {' '.join(map(str, bins))};\nAction: "


class Tokenizer(Protocol):
    """What a prompt needs of a tokenizer."""

    bos_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS and EOS."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model held as bytes, so that it travels to workers and into checkpoints."""

    def __init__(self, model_bytes: bytes):
        self.model_bytes = model_bytes
        # Opened lazily: the processor holds C++ memory that no pickle carries to a worker.
        self._processor: Any = None
        self.bos_id = int(self.processor.bos_id())

    @property
    def processor(self) -> Any:
        """The SentencePiece processor, opened in this process on first use."""
        if self._processor is None:
            from sentencepiece import SentencePieceProcessor

            self._processor = SentencePieceProcessor(model_proto=self.model_bytes)
        return self._processor

    def __getstate__(self) -> dict[str, Any]:
        return {"model_bytes": self.model_bytes, "_processor": None, "bos_id": self.bos_id}

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.processor.vocab_size())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS and EOS."""
        return list(self.processor.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; control tokens (BOS, padding) vanish."""
        return str(self.processor.decode([int(i) for i in ids]))


def load_tokenizer(path: str | None, vocab_size: int) -> tuple[SentencePieceTokenizer | None, list[Finding]]:
    """(the tokenizer, or None with errors). Reads a local file only; `vocab_size` is the model's number of embedding rows."""
    where = "--tokenizer-model"
    if path is None:
        return None, [
            error(
                where, "not given", "give a local SentencePiece file (Pi0.5: paligemma_tokenizer.model); nothing is downloaded"
            )
        ]
    if not Path(path).is_file():
        return None, [
            error(
                where,
                f"{path} is not a file",
                "copy the SentencePiece file to a path that every rank can read; nothing is downloaded",
            )
        ]
    try:
        tokenizer = SentencePieceTokenizer(Path(path).read_bytes())
    except (RuntimeError, OSError) as problem:
        return None, [error(where, f"{path} is not a SentencePiece model ({problem})", "name a .model file")]
    findings = []
    if tokenizer.bos_id < 0:
        # Without BOS every position would be shifted by one against the released weights.
        findings.append(error(where, f"{path} has no BOS token", "prompts start with BOS: use the model's own tokenizer"))
    if tokenizer.vocab_size > vocab_size:
        findings.append(
            error(
                where,
                f"{path} has {tokenizer.vocab_size} tokens; --vocab-size is {vocab_size}",
                f"use --vocab-size {tokenizer.vocab_size} or more (new rows start at random), or the model's own tokenizer",
            )
        )
    return (None if findings else tokenizer), findings


def prompt_ids(tokenizer: Tokenizer, instruction: str, state_D: np.ndarray | None) -> list[int]:
    """BOS and the prompt's ids.

    `state_D` normalized: state in the prompt; None: task text, then a newline encoded on its own.
    """
    return prompts_ids(tokenizer, [instruction], None if state_D is None else state_D[None])[0]


def prompts_ids(tokenizer: Tokenizer, instructions: Sequence[str], state_nD: np.ndarray | None) -> list[list[int]]:
    """`prompt_ids` of n samples."""
    if state_nD is None:
        # Encoded apart: in one string the newline could merge with the text's last token.
        return [
            [tokenizer.bos_id, *tokenizer.encode(clean_instruction(text)), *tokenizer.encode("\n")] for text in instructions
        ]
    prompts = map(_binned_prompt, instructions, discretize_state(state_nD).tolist())
    return [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]


def pad_prompts(prompts: Sequence[list[int]], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64 ids [n, L] right-padded with 0 or cut on the right, bool [n, L] validity)."""
    # Right padding: positions of real tokens do not depend on the batch.
    tokens_nL = np.full((len(prompts), max_length), PAD_ID, dtype=np.int64)
    length_n = np.array([min(len(ids), max_length) for ids in prompts])
    for tokens_L, ids in zip(tokens_nL, prompts, strict=True):
        tokens_L[: len(ids)] = ids[:max_length]
    return tokens_nL, np.arange(max_length) < length_n[:, None]


def worst_case_state(tokenizer: Tokenizer, state_dim: int) -> np.ndarray:
    """[D] a normalized state whose prompt text costs the most tokens of all states."""
    # Four in a row, because a tokenizer may merge the space before a number with it.
    lengths = [len(tokenizer.encode(f" {value}" * 4)) for value in range(-1, NUM_STATE_BINS)]
    worst_bin = int(np.argmax(lengths)) - 1
    return np.full(state_dim, (worst_bin + 0.5) / (NUM_STATE_BINS / 2) - 1.0)


def longest_prompts(tokenizer: Tokenizer, instructions: Iterable[str], state_dim: int | None) -> dict[str, int]:
    """Tokens of the longest possible prompt of every task. `state_dim` None: no state in the prompt."""
    state_D = None if state_dim is None else worst_case_state(tokenizer, state_dim)
    extra = 0
    if state_D is not None:
        # The last number is followed by a semicolon, which a tokenizer may have merged with some numbers and not with others.
        worst = discretize_state(state_D[:1])[0]
        ends = [len(tokenizer.encode(f" {worst} {value};")) for value in range(-1, NUM_STATE_BINS)]
        extra = max(ends) - len(tokenizer.encode(f" {worst} {worst};"))
    return {text: len(prompt_ids(tokenizer, text, state_D)) + extra for text in dict.fromkeys(instructions)}


def check_prompt_lengths(lengths: Mapping[str, int], max_length: int, overflow: str) -> list[Finding]:
    """`longest_prompts` against --max-prompt-length."""
    too_long = {text: length for text, length in lengths.items() if length > max_length}
    if not too_long:
        return []
    longest = max(too_long, key=lambda text: too_long[text])
    what = (
        f"{len(too_long)} of {len(lengths)} task(s) can give prompts of up to {too_long[longest]} tokens "
        f"(for example {longest[:60]!r}); {max_length} fit"
    )
    if overflow == "truncate":
        return [
            warning("--max-prompt-length", what, "they are cut on the right as --prompt-overflow truncate says, and counted")
        ]
    fix = f"use --max-prompt-length {too_long[longest]}, or --prompt-overflow truncate to cut them"
    return [error("--max-prompt-length", what, fix)]
