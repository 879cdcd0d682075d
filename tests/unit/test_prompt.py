"""Prompt and tokenizer beyond the golden strings."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from preprocess_fixtures import MemoryDataset, preprocessor, tokenizer, tokenizer_bytes

from megatron_vla.data.prompt import (
    SentencePieceTokenizer,
    check_prompt_lengths,
    discretize_state,
    load_tokenizer,
    longest_prompts,
    prompt_ids,
    state_prompt,
    worst_case_state,
)
from tools.train_tokenizer import train_tokenizer


def test_bins_at_the_edges() -> None:
    state_D = np.array([-1.5, -1, -0.999, 0, 0.0079, 1 - 1 / 128, 3])
    assert discretize_state(state_D).tolist() == [-1, 0, 0, 128, 129, 255, 255]
    # One float64 step below an edge is the lower bin; float32 edges or inputs would lose it.
    assert discretize_state(np.array([np.nextafter(0.5, 0), 0.5])).tolist() == [191, 192]


def test_state_off_is_text_then_newline_with_bos_in_front() -> None:
    model = tokenizer()
    ids = prompt_ids(model, " pick_up the\nred block ", None)
    assert ids == [2, *model.encode("pick up the red block"), *model.encode("\n")]
    assert model.decode(ids).strip() == "pick up the red block"


def test_state_on_decodes_to_the_very_prompt() -> None:
    model = tokenizer()
    state_D = np.array([-2.0, 0.1, 0.99])
    ids = prompt_ids(model, "Open_it", state_D)
    assert ids[0] == 2
    assert ids.count(2) == 1
    assert model.decode(ids).lstrip() == state_prompt("Open_it", state_D) == "Task: Open it, State: -1 140 254;\nAction: "


def test_tokenizer_travels_to_workers() -> None:
    model = tokenizer()
    again = pickle.loads(pickle.dumps(model))
    assert again.encode("pick up 17") == model.encode("pick up 17")
    assert again.bos_id == 2


def test_C07_missing_tokenizer_file_says_what_to_do(tmp_path: Path) -> None:
    for path in (None, str(tmp_path / "absent.model")):
        model, findings = load_tokenizer(path, 1000)
        assert model is None
        assert findings[0].where == "--tokenizer-model"
        assert "nothing is downloaded" in findings[0].fix
    bad = tmp_path / "bad.model"
    bad.write_bytes(b"no model")
    model, findings = load_tokenizer(str(bad), 1000)
    assert model is None
    assert "is not a SentencePiece model" in findings[0].what


def test_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer_bytes())
    size = tokenizer().vocab_size
    assert load_tokenizer(str(path), size)[1] == []
    model, findings = load_tokenizer(str(path), size - 1)
    assert model is None
    assert f"{size} tokens; --vocab-size is {size - 1}" in findings[0].what


@pytest.mark.parametrize("vocab_size", [400, 512, 700, 1024])
def test_worst_case_is_at_least_every_state(vocab_size: int) -> None:
    """Also where the vocabulary has room for some numbers with the semicolon after the last, and not for all."""
    texts = ("go", "reach")
    for model in (tokenizer(), SentencePieceTokenizer(train_tokenizer(texts, vocab_size))):
        longest = longest_prompts(model, texts, 6)
        generator = np.random.default_rng(0)
        states = [generator.uniform(-1.2, 1.2, 6) for _ in range(300)]
        # Every number in the last place, after the costliest and after others.
        bins = (np.arange(-1, 256) + 0.5) / 128 - 1
        for before in (worst_case_state(model, 5), generator.uniform(-1, 1, 5)):
            states += [np.array([*before, value]) for value in bins]
        for text in texts:
            lengths = [len(prompt_ids(model, text, state)) for state in states]
            assert max(lengths) <= longest[text] <= max(lengths) + 1


def test_long_tasks_are_found_before_the_start() -> None:
    model = tokenizer()
    tasks = ["go", "pick up the green block and then " * 4]
    lengths = longest_prompts(model, tasks, 3)
    longest = lengths[tasks[1]]
    assert longest == max(lengths.values()) == len(prompt_ids(model, tasks[1], worst_case_state(model, 3)))
    assert check_prompt_lengths(lengths, longest, "error") == []
    (finding,) = check_prompt_lengths(lengths, longest - 1, "error")
    assert finding.severity == "error"
    assert f"1 of 2 task(s) can give prompts of up to {longest} tokens" in finding.what
    assert f"--max-prompt-length {longest}" in finding.fix
    (finding,) = check_prompt_lengths(lengths, longest - 1, "truncate")
    assert finding.severity == "warning"


def test_overflow_is_an_error_or_cut_and_counted() -> None:
    dataset = MemoryDataset()
    state_D = dataset.state_ND[0]
    strict = preprocessor(dataset, max_prompt_length=12)
    with pytest.raises(ValueError, match=r"prompt of \d+ tokens for the task 'go'; 12 fit: use --max-prompt-length"):
        strict.preprocess_observation(dataset[0].images, state_D, "go")
    cutting = preprocessor(dataset, max_prompt_length=12, prompt_overflow="truncate")
    full = cutting.prompt_token_ids("go", cutting.state_normalizer.normalize(state_D))
    for count in (1, 2):
        arrays = cutting.preprocess_observation(dataset[0].images, state_D, "go")
        assert cutting.num_truncated_prompts == count
    assert arrays["tokens_BL"].tolist() == full[:12]
    assert arrays["token_is_valid_BL"].all()
