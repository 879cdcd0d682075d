"""Whole GR00T N1.7 models of drawn sizes against a second, literal implementation: loss, gradients, actions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import groot_reference
import numpy as np
import pytest
import torch
from groot_model_fixtures import our_parts, released_loss
from groot_reference import Reference, Sample, Sizes
from safetensors.torch import save_file
from torch import Tensor

from megatron_vla.data.groot.pictures import patch_rows
from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.build import build_module, set_dtypes
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.convert import CONVERTER
from megatron_vla.models.groot_n1_7.sampling import sample_actions

LIMIT = 1e-10
STEPS = 3
HORIZON = 3


def drawn_sizes(generator: np.random.Generator) -> Sizes:
    """Sizes that are as unequal as the model allows."""

    def one_of(*values: Any) -> Any:
        return values[int(generator.integers(len(values)))]

    vision_layers, num_deepstack = int(generator.integers(1, 5)), int(generator.integers(0, 4))
    num_deepstack = min(num_deepstack, vision_layers)
    deepstack = tuple(sorted(generator.choice(vision_layers, num_deepstack, replace=False).tolist()))
    vision_heads, kv_heads, dit_heads, vl_heads = one_of(1, 2, 3), one_of(1, 2), one_of(1, 2, 3), one_of(1, 2, 4)
    head_width, sections = one_of((8, (2, 1, 1)), (12, (2, 2, 2)), (16, (4, 2, 2)))
    vocabulary = int(generator.integers(20, 40))
    return Sizes(
        patch=one_of(2, 4),
        vision_width=vision_heads * one_of(4, 8),
        vision_layers=vision_layers,
        vision_heads=vision_heads,
        vision_ffn=one_of(5, 12),
        table_side=int(generator.integers(2, 8)),
        deepstack=deepstack,
        text_layers=max(num_deepstack, int(generator.integers(1, 4))),
        hidden=vl_heads * one_of(3, 6),
        heads=kv_heads * one_of(1, 2, 3),
        kv_heads=kv_heads,
        head_width=head_width,
        text_ffn=one_of(7, 16),
        vocabulary=vocabulary,
        theta=one_of(5e6, 1e4),
        sections=sections,
        vl_layers=int(generator.integers(0, 3)),
        vl_heads=vl_heads,
        vl_ffn=one_of(6, 10),
        dit_layers=int(generator.integers(1, 7)),
        dit_heads=dit_heads,
        dit_head_width=one_of(4, 6),
        dit_ffn=one_of(5, 14),
        text_every=one_of(1, 2, 2, 3),
        head_hidden=one_of(3, 8),
        embodiments=int(generator.integers(1, 5)),
        state_dim=one_of(2, 5),
        state_history=int(generator.integers(1, 4)),
        action_dim=one_of(3, 4),
        positions=int(generator.integers(HORIZON, 9)),
        buckets=one_of(1000, 100),
        image_token=vocabulary - 1,
        mask_vl=bool(generator.random() < 0.5),
        mask_padded=bool(generator.random() < 0.5),
    )


def drawn_samples(z: Sizes, generator: np.random.Generator) -> list[Sample]:
    """Mixed embodiments, prompts, numbers and sizes of images; masks that no rule explains."""
    prompts, pictures = [], []
    for _ in range(int(generator.integers(1, 5))):
        sides = 2 * z.patch * generator.integers(1, 4, (int(generator.integers(1, 4)), 2))
        pictures.append([torch.from_numpy(generator.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sides.tolist()])
        tokens = generator.integers(1, z.image_token, int(generator.integers(1, 4))).tolist()
        for height, width in sides.tolist():
            tokens += [z.image_token] * (height * width // (2 * z.patch) ** 2)
            tokens += generator.integers(1, z.image_token, int(generator.integers(1, 4))).tolist()
        prompts.append(tokens)
    slots = max(map(len, prompts)) + int(generator.integers(0, 3))
    shape, samples = (HORIZON, z.action_dim), []
    for tokens, images in zip(prompts, pictures, strict=True):
        padding = slots - len(tokens)
        real = int(generator.integers(1, z.action_dim + 1))
        actions = torch.from_numpy(generator.uniform(-1, 1, shape).astype(np.float32))
        actions[:, real:] = 0.0
        mask = torch.from_numpy(generator.random(shape) < 0.7)
        mask[0, 0], mask[:, real:] = True, False
        samples.append(
            Sample(
                tokens=[0] * padding + tokens,
                is_valid=[False] * padding + [True] * len(tokens),
                images=images,
                state_HD=torch.from_numpy(generator.uniform(-1, 1, (z.state_history, z.state_dim)).astype(np.float32)),
                state_is_dropped=bool(generator.random() < 0.3),
                embodiment=int(generator.integers(z.embodiments)),
                actions_TA=actions,
                noise_TA=torch.from_numpy(generator.standard_normal(shape).astype(np.float32)),
                loss_mask_TA=mask,
                dim_is_real_A=torch.arange(z.action_dim) < real,
                # 0.9 and the like are where fp32 and fp64 choose different buckets.
                time=torch.tensor(generator.choice([generator.random(), 0.9, 0.0004, 0.29]), dtype=torch.float32),
            )
        )
    return samples


def our_config(z: Sizes) -> GrootN17Config:
    return GrootN17Config(
        vision_patch_size=z.patch,
        vision_hidden_size=z.vision_width,
        vision_num_layers=z.vision_layers,
        vision_num_attention_heads=z.vision_heads,
        vision_ffn_hidden_size=z.vision_ffn,
        vision_num_position_embeddings=z.table_side**2,
        vision_deepstack_layers=z.deepstack,
        num_layers=z.text_layers,
        hidden_size=z.hidden,
        num_attention_heads=z.heads,
        num_query_groups=z.kv_heads,
        kv_channels=z.head_width,
        ffn_hidden_size=z.text_ffn,
        vocab_size=z.vocabulary,
        rope_theta=z.theta,
        mrope_sections=z.sections,
        image_token=z.image_token,
        padding_token=0,
        max_prompt_length=512,
        vl_num_layers=z.vl_layers,
        vl_num_attention_heads=z.vl_heads,
        vl_ffn_hidden_size=z.vl_ffn,
        dit_num_layers=z.dit_layers,
        dit_num_attention_heads=z.dit_heads,
        dit_kv_channels=z.dit_head_width,
        dit_ffn_hidden_size=z.dit_ffn,
        attend_text_every_n_blocks=z.text_every,
        head_hidden_size=z.head_hidden,
        num_embodiments=z.embodiments,
        max_state_dim=z.state_dim,
        state_history_length=z.state_history,
        max_action_dim=z.action_dim,
        action_horizon=HORIZON,
        num_action_positions=z.positions,
        num_timestep_buckets=z.buckets,
        dropout=0.0,
        mask_vl_self_attention=z.mask_vl,
        mask_padded_action_dims=z.mask_padded,
        tune_llm=True,
        tune_visual=True,
    )


def our_sample(z: Sizes, number: int, sample: Sample) -> dict[str, Any]:
    grids = [(1, image.shape[0] // z.patch, image.shape[1] // z.patch) for image in sample.images]
    # Padded dimensions of the data may hold anything.
    actions = torch.where(sample.dim_is_real_A, sample.actions_TA, float("nan"))
    return {
        "tokens_BS": np.array(sample.tokens),
        "token_is_valid_BS": np.array(sample.is_valid),
        "pixels_PC": torch.cat([patch_rows(image[None], z.patch, 2) for image in sample.images]).numpy(),
        "image_grid_I3": np.array(grids),
        "state_BHD": sample.state_HD.numpy(),
        "state_is_dropped_B": np.bool_(sample.state_is_dropped),
        "embodiment_B": np.int64(sample.embodiment),
        "actions_BTA": actions.numpy(),
        "action_is_valid_BTA": sample.loss_mask_TA.numpy(),
        "action_dim_is_valid_BA": sample.dim_is_real_A.numpy(),
        "noise_BTA": sample.noise_TA.numpy(),
        "time_B": sample.time.numpy(),
        "sample_index_B": np.int64(number),
        "epoch_B": np.int64(0),
    }


def drawn_weights(z: Sizes, generator: np.random.Generator) -> dict[str, Tensor]:
    """fp32 numbers; norms are around one, so that nothing is closed."""
    found = {}
    for name, shape in groot_reference.shapes(z).items():
        values = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
        is_norm = len(shape) == 1 and name.endswith("weight")
        fan_in = shape[-2] if name.endswith(".W") else int(np.prod(shape[1:]))
        found[name] = 1 + 0.2 * values if is_norm else values * (0.2 if len(shape) == 1 else fan_in**-0.5)
    return found


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
def test_a_drawn_model(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    z = drawn_sizes(generator)
    samples, stored = drawn_samples(z, generator), drawn_weights(z, generator)
    weights = {name: tensor.double().requires_grad_() for name, tensor in stored.items()}
    reference = Reference(z, weights)
    expected = reference.loss(samples)
    expected.backward()

    backend: AttentionBackend = "eager" if seed % 2 else "sdpa"
    model = build_module(our_config(z), attention_backend=backend)
    set_dtypes(model, torch.float64)
    save_file(stored, tmp_path / "model.safetensors")
    CONVERTER.load(tmp_path, model, report=lambda line: None)
    ours = [our_sample(z, number, sample) for number, sample in enumerate(samples)]
    batch = Assembler(model.config, share_dtype=np.float64)(ours, len(samples[0].tokens))
    loss = released_loss(model, batch)
    assert abs(float(loss.detach()) - float(expected.detach())) <= LIMIT * float(expected.detach())
    loss.backward()
    parameters = dict(model.named_parameters())
    largest = max(float(w.grad.abs().max()) for w in weights.values() if w.grad is not None)
    compared = 0
    for name, weight in weights.items():
        # No gradient: nothing reads it (the final norm; text features without such a block; states that are all hidden).
        wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for own_name, gradient in our_parts(name, wanted).items():
            found = parameters[own_name].grad
            found = torch.zeros_like(gradient) if found is None else found
            assert float((found - gradient).abs().max()) <= LIMIT * largest, own_name
            compared += weight.grad is not None
    assert compared >= 40

    with torch.no_grad():
        actions = sample_actions(model, replace(batch), STEPS, batch.noise_BTA)
        for number, sample in enumerate(samples):
            wanted = reference.actions(sample, STEPS)
            assert float((actions[number] - wanted).abs().max()) <= LIMIT * float(wanted.abs().max())
