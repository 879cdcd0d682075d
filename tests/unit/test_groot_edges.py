"""GR00T at its edges: one to three cameras of odd sizes, no words, no pictures, which weights move, no readbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groot_fixtures import (
    CAMERAS,
    MODALITY_JSON,
    data_flags,
    write_dataset,
    write_modality_config,
    write_tokenizer,
)
from groot_model_fixtures import mean_loss, replaced, tiny_batch, tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from training_fixtures import build_run, take_steps

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import parse_args
from megatron_vla.data.build import build_data
from megatron_vla.findings import CheckError
from megatron_vla.models.common.precision import dtype_of
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.build import build
from megatron_vla.models.groot_n1_7.forward_step import loss_func
from megatron_vla.models.groot_n1_7.samples import build_mock_source, draws
from megatron_vla.models.groot_n1_7.sampling import sample_actions
from megatron_vla.models.registry import model_family
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down

FAMILY = model_family("groot_n1_7")
MOCK = (
    *("--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data", "--mock-num-samples", "8", "--num-workers", "0"),
    *("--mock-prompt-length", "5", "--mock-num-embodiments", "2", "--micro-batch-size", "2", "--no-first-batch-report"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 37 x 53 pixels, and a third view that shows the first camera again."""
    root = tmp_path_factory.mktemp("edges")
    video = {**MODALITY_JSON["video"], "side": {"original_key": CAMERAS[0]}}
    write_dataset(root / "robot", {**MODALITY_JSON, "video": video}, size=(37, 53))
    write_tokenizer(root)
    return root


@pytest.mark.parametrize("views", [("wrist",), ("front", "wrist"), ("front", "wrist", "side")], ids=len)
@pytest.mark.parametrize("augmentation", ["none", "groot"])
def test_odd_pictures_of_one_to_three_cameras(folder: Path, tmp_path: Path, views: tuple[str, ...], augmentation: str) -> None:
    """64 x 92 after the resize, 64 x 91 after crop and second resize, 64 x 96 for the tower: 2 x 3 tokens each."""
    path = write_modality_config(tmp_path, video={"delta_indices": [0], "modality_keys": list(views)})
    flags = ("--modality-config", str(path), "--augmentation", augmentation, "--max-prompt-length", "80")
    config = parse_args(data_flags(folder / "robot", folder / "tokenizer.json", *flags))
    supply = build_data(config, FAMILY)
    (batch,) = supply.iterator(0, 0, 1, 1, False)
    supply.close()
    assert batch.image_row_IQ.shape == (4 * len(views), 24) and batch.image_token_M.shape == (4 * len(views) * 6,)
    # Equal pictures are equal rows, also with one window for all views.
    if len(views) == 3:
        pictures = batch.pixels_PC.view(4, 3, 24, -1)
        assert torch.equal(pictures[:, 0], pictures[:, 2]) and not torch.equal(pictures[:, 0], pictures[:, 1])
    model = build(config)
    assert bool(mean_loss(model, batch).isfinite())


def test_instructions_without_words(folder: Path, tmp_path: Path) -> None:
    """Punctuation alone is none: refused, or kept, which leaves the chat's markers and the pictures."""
    write_dataset(tmp_path / "robot")
    tasks = tmp_path / "robot/meta/tasks.jsonl"
    lines = [json.loads(line) for line in tasks.read_text().splitlines()]
    tasks.write_text("\n".join(json.dumps({**line, "task": "?!"}) for line in lines) + "\n")
    path = write_modality_config(tmp_path)
    flags = data_flags(tmp_path / "robot", folder / "tokenizer.json", "--modality-config", str(path))
    with pytest.raises(CheckError, match=r"4 of 4\) have an empty instruction"):
        build_data(parse_args(flags), FAMILY)
    config = parse_args([*flags, "--empty-instruction", "keep"])
    supply = build_data(config, FAMILY)
    (batch,) = supply.iterator(0, 0, 1, 1, False)
    text = supply.preprocessor.tokenizer.decode(batch.tokens_BS[0][batch.token_is_valid_BS[0]].numpy())  # type: ignore[union-attr]
    supply.close()
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|vision_end|><|im_end|>\n")
    assert bool(mean_loss(build(config), batch).isfinite())


def test_a_sample_without_pictures_is_refused() -> None:
    """Its image blocks would have nothing to attend; released code makes NaN of it."""
    config = tiny_config()
    source, _ = build_mock_source(parse_args([*MOCK]))
    sample = {**source(5, 0), **draws(config, 1, 0, 5)}
    words = sample["token_is_valid_BS"] & (sample["tokens_BS"] != source.family.image_token)
    bare = {
        **sample,
        "token_is_valid_BS": words,
        "image_grid_I3": sample["image_grid_I3"][:0],
        "pixels_PC": sample["pixels_PC"][:0],
    }
    with pytest.raises(ValueError, match="sample 5 has no images"):
        Assembler(source.family)([sample, bare])


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


PROJECTOR = ("state_encoder", "action_encoder", "action_decoder", "action_position_embedding")
DIT = ("time_mlp_in", "time_mlp_out", "dit_layers", "output_norm", "output_proj")
VLLN = ("vl_norm", "vl_layers")
ONLY = ("--no-tune-projector", "--no-tune-diffusion-model", "--no-tune-vlln")


@pytest.mark.parametrize(
    ("flags", "moving"),
    [
        ((), (*PROJECTOR, *DIT, *VLLN)),
        (("--no-tune-projector",), (*DIT, *VLLN)),
        (("--no-tune-diffusion-model",), (*PROJECTOR, *VLLN)),
        (("--no-tune-vlln",), (*PROJECTOR, *DIT)),
        ((*ONLY, "--tune-llm"), ("token_embedding", "text_layers")),
        ((*ONLY, "--tune-visual"), ("vision_tower",)),
        ((*ONLY, "--tune-top-llm-layers", "2"), ("text_layers.2", "text_layers.3")),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_flags_move_their_weights_and_no_others(
    groups: ParallelGroups, flags: tuple[str, ...], moving: tuple[str, ...]
) -> None:
    """After two steps, with frozen parts that are rounded to bf16."""
    run = build_run(parse_args([*MOCK, "--train-iters", "4", "--lr-warmup-iters", "1", "--lr", "1e-2", *flags]), groups)
    before = {name: p.detach().clone() for name, p in run.state.module.named_parameters()}
    take_steps(run, 2)
    moved = {name for name, p in run.state.module.named_parameters() if not torch.equal(p, before[name])}
    expected = {name for name in before if name.startswith(tuple(f"{prefix}." for prefix in moving))}
    # A key's bias has no gradient but rounding.
    ignored = {name for name in expected if name.endswith("k_proj.bias")}
    assert moved | ignored == expected
    frozen = dtype_of(run.state.module.get_submodule("text_layers.0.mlp.up_proj"))
    assert (frozen == torch.bfloat16) == ("--tune-llm" not in flags)


class Readbacks(TorchDispatchMode):
    """Names of operations that copy a number to the host, or whose shapes follow from values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strict", [False, True])
def test_nothing_is_read_back(strict: bool) -> None:
    """Forward, backward, loss and sampling of a micro-batch of several grids and embodiments."""
    changes = {"mask_vl_self_attention": strict, "mask_padded_action_dims": strict, "tune_visual": strict}
    config = tiny_config(dropout=0.2, **changes)
    model, batch = tiny_model(config), tiny_batch(config)
    with Readbacks() as watch:
        loss_sum, _, _ = loss_func(batch, model(batch))
        loss_sum.backward()
        sample_actions(model, batch, 2, batch.noise_BTA)
    assert watch.found == []
    with Readbacks() as watch:
        float(loss_sum.detach())
    assert watch.found == ["_local_scalar_dense"]


def test_words_under_padding_matter_as_released_and_not_when_masked() -> None:
    batch = tiny_batch()
    other = replaced(batch, tokens_BS=torch.where(batch.token_is_valid_BS, batch.tokens_BS, 7))
    for strict in (False, True):
        model = tiny_model(tiny_config(mask_vl_self_attention=strict))
        with torch.no_grad():
            assert torch.equal(model(other), model(batch)) is strict
