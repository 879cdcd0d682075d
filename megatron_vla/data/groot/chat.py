"""The chat prompt of GR00T N1.7: one user turn of all images and the instruction, left-padded.

    <|im_start|>user\\n<|vision_start|><|image_pad|>...<|vision_end|> ... instruction<|im_end|>\\n

No system turn, no generation prompt; `<|image_pad|>` once per image token. Source: spec of GR00T N1.7, section 5.5.

Shape legend: S token slots.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
PADDING, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE = SPECIAL_TOKENS
_PUNCTUATION = re.compile(r"[^\w\s]")


class ChatTokenizer(Protocol):
    """What a chat prompt needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        ...

    def token_id(self, token: str) -> int:
        """Id of a special token."""
        ...


def formalized(instruction: str) -> str:
    """Lower case, and nothing but word characters and white space."""
    return _PUNCTUATION.sub("", instruction.lower())


def chat_ids(tokenizer: ChatTokenizer, instruction: str, tokens_per_image: Sequence[int]) -> list[int]:
    """Ids of the whole prompt, neither cut nor padded.

    Special tokens always split the text for the tokenizer, so the pieces between them are encoded on their own.
    """
    ids = [tokenizer.token_id(TURN_START), *tokenizer.encode("user\n")]
    start, image, end = (tokenizer.token_id(token) for token in (VISION_START, IMAGE, VISION_END))
    for count in tokens_per_image:
        ids += [start, *([image] * count), end]
    return [*ids, *tokenizer.encode(instruction), tokenizer.token_id(TURN_END), *tokenizer.encode("\n")]


def pad_left(ids: Sequence[int], slots: int, padding: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64 ids [S], bool [S] validity). The prompt must fit: a cut one would lose images."""
    tokens_S = np.full(slots, padding, dtype=np.int64)
    tokens_S[slots - len(ids) :] = ids
    return tokens_S, np.arange(slots) >= slots - len(ids)
