"""Packs on the GPU: losses and gradients against the padded batch, isolation, host synchronisation, graph replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from pi05_fixtures import relative_difference
from torch import Tensor

from megatron_vla.data.augmentation import Augmentation
from megatron_vla.data.batch import Batch, collate_tensors
from megatron_vla.data.mock import MockSource
from megatron_vla.data.packed_batch import PackedBatch, pack_samples
from megatron_vla.data.packing import PackLimits
from megatron_vla.models.common.initialization import initialize_parameters, normal
from megatron_vla.models.common.precision import set_parameter_dtypes
from megatron_vla.models.pi05.build import FP32_PATTERNS, build_module
from megatron_vla.models.pi05.config import VARIANTS, Pi05Config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = Pi05Config(**{**VARIANTS["small"], "num_layers": 4, "vision_num_layers": 2})
PATCHES = (CONFIG.image_size // CONFIG.patch_size) ** 2
LIMITS = PackLimits(
    tokens=4096, images=14, samples=9, image_tokens=PATCHES, most_images=4, most_prompt_tokens=200, pool_size=8, max_wait=9
)


def samples(seed: int = 0) -> list[dict[str, Any]]:
    """Five mock samples, 1 to 4 cameras each, with their draws; `seed` changes contents, not sizes."""
    found = []
    for number, cameras in enumerate((1, 4, 2, 3, 1)):
        source = MockSource(
            num_samples=9,
            num_cameras=4,
            camera_counts=(cameras,),
            num_images=4,
            image_size=CONFIG.image_size,
            min_prompt_length=20 + 30 * number,
            prompt_length=20 + 30 * number,
            max_prompt_length=CONFIG.max_prompt_length,
            vocab_size=CONFIG.vocab_size,
            action_horizon=CONFIG.action_horizon,
            max_action_dim=CONFIG.max_action_dim,
            action_loss="valid",
            seed=seed,
        )
        generator = np.random.default_rng([seed, number])
        noise_TA = generator.normal(size=(CONFIG.action_horizon, CONFIG.max_action_dim)).astype(np.float32)
        found.append({**source(number, 0), "noise_BTA": noise_TA, "time_B": np.float32(generator.uniform(0.1, 0.9))})
    return found


def packed(arrays: list[dict[str, Any]]) -> PackedBatch:
    batch = PackedBatch(**pack_samples(arrays, LIMITS), longest_sequence=LIMITS.longest_prefix)
    return batch.to(torch.device("cuda"))


def model() -> Any:
    built = build_module(CONFIG)
    set_parameter_dtypes(built, torch.bfloat16, FP32_PATTERNS)
    initialize_parameters(built, lambda name: normal(0.02), seed=7)
    return built.cuda()


def run(built: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the five samples, and the gradients of their sum."""
    built.zero_grad()
    losses = torch.where(batch.action_is_valid_BTA, built(batch), 0.0).sum(dim=(1, 2))
    losses.sum().backward()
    return losses.detach()[:5], {name: p.grad.float() for name, p in built.named_parameters() if p.grad is not None}


def test_pack_equals_padded_batch_within_bf16() -> None:
    built = model()
    padded = Batch(**collate_tensors(samples())).to(torch.device("cuda"))
    expected, expected_gradients = run(built, padded)
    found, gradients = run(built, packed(samples()))
    assert relative_difference(found, expected) <= 1e-2
    largest = max(float(gradient.norm()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert bool(torch.isfinite(gradients[name]).all()), name
        # Small gradients are rounding noise of both.
        if float(gradient.norm()) > 1e-3 * largest:
            assert float((gradients[name] - gradient).norm() / gradient.norm()) <= 5e-2, name


def test_neighbours_do_not_move_a_sample_by_a_bit() -> None:
    built, reference, others = model(), samples(), samples(seed=1)
    with torch.no_grad():
        before = built(packed(reference))
        for kept in range(5):
            mixed = [reference[n] if n == kept else others[n] for n in range(5)]
            assert torch.equal(built(packed(mixed))[kept], before[kept])


def test_step_asks_the_host_for_nothing_and_replays_as_a_graph() -> None:
    """Static shapes, nothing read on the host: forward and backward are captured and replayed on other packs."""
    built, first, second = model(), packed(samples()), packed(samples(seed=1)[::-1])
    expected, expected_gradients = run(built, second)
    static = dataclasses.replace(first, **{name: tensor.clone() for name, tensor in first.tensors().items()})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(built, static)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(built, static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    built.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = torch.where(static.action_is_valid_BTA, built(static), 0.0).sum(dim=(1, 2))
        losses.sum().backward()
    for name, tensor in static.tensors().items():
        tensor.copy_(second.tensors()[name])
    graph.replay()
    torch.cuda.synchronize()
    assert relative_difference(losses.detach()[:5], expected) <= 1e-3
    largest = max(float(gradient.norm()) for gradient in expected_gradients.values())
    for name, parameter in built.named_parameters():
        if parameter.grad is not None and float(expected_gradients[name].norm()) > 1e-3 * largest:
            difference = (parameter.grad.float() - expected_gradients[name]).norm() / expected_gradients[name].norm()
            assert float(difference) <= 2e-2, name


@pytest.mark.parametrize("kind", ["openpi_torch", "openpi_jax"])
def test_augmentation_of_packed_images_waits_for_nothing(kind: Any) -> None:
    plan = Augmentation(kind, seed=1, image_size=CONFIG.image_size, views=("base", "left_wrist", "right_wrist", "side"))
    arrays = [{**sample, "augmentation_BVP": plan.parameters(sample, 0)} for sample in samples()]
    tensors = pack_samples(arrays, LIMITS, ("augmentation_BVP",))
    on_cpu = plan.apply_to_images(tensors["images_ICYX"], tensors["augmentation_BVP"], tensors["image_view_I"])
    images, parameters = tensors["images_ICYX"].cuda(), tensors["augmentation_BVP"].cuda()
    plan.apply_to_images(images, parameters, tensors["image_view_I"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = plan.apply_to_images(images, parameters, tensors["image_view_I"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float((on_gpu.cpu() - on_cpu).abs().mean()) <= 2 / 255 / 100
