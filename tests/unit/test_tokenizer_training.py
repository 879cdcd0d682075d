"""The small tokenizer spells every prompt, and the same instructions give the same file."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_vla.data.prompt import SentencePieceTokenizer, prompt_ids, state_prompt
from megatron_vla.evaluation.environments.metaworld import INSTRUCTIONS
from tools.train_tokenizer import train_tokenizer

THREE = ["Open a drawer", "Push and close a window", "Press a button from the top"]


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train_tokenizer(THREE, 1024))


def test_control_ids_are_paligemmas(tokenizer: SentencePieceTokenizer) -> None:
    processor = tokenizer.processor
    assert [processor.pad_id(), processor.eos_id(), processor.bos_id(), processor.unk_id()] == [0, 1, 2, 3]
    assert tokenizer.vocab_size <= 1024
    assert processor.encode("\n", out_type=str) == ["\n"]


@pytest.mark.parametrize("value", [-1, 0, 9, 10, 99, 100, 128, 254, 255])
def test_state_bins_are_single_tokens(tokenizer: SentencePieceTokenizer, value: int) -> None:
    assert len(tokenizer.encode(f" {value}")) == 1


@pytest.mark.parametrize(
    "text", [state_prompt(THREE[0], np.array([-2.0, -1.0, 0.0, 2.0])), "Schließe die Tür, 你好\n", " a  b "]
)
def test_every_text_round_trips(tokenizer: SentencePieceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompt_with_state_is_short(tokenizer: SentencePieceTokenizer) -> None:
    lengths = [len(prompt_ids(tokenizer, text, np.linspace(-1.5, 1.5, 4))) for text in THREE]
    assert max(lengths) <= 24, lengths


def test_order_and_repetition_of_instructions_do_not_matter() -> None:
    assert train_tokenizer(THREE, 700) == train_tokenizer([*reversed(THREE), THREE[1], THREE[0] + "\n"], 700)


def test_all_fifty_metaworld_instructions_fit() -> None:
    tokenizer = SentencePieceTokenizer(train_tokenizer(INSTRUCTIONS.values(), 2048))
    assert max(len(prompt_ids(tokenizer, text, np.zeros(4))) for text in INSTRUCTIONS.values()) <= 32


@pytest.mark.parametrize(("texts", "size", "message"), [([], 1024, "no instructions"), (THREE, 200, "--vocab-size 200")])
def test_impossible_requests_say_why(texts: list[str], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, size)
