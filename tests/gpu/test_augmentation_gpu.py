"""Augmentation of a whole batch on the GPU equals the workers' on the CPU, without a host synchronisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_vla.config.data import AugmentationKind
from megatron_vla.data.augmentation import Augmentation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LSB = 2 / 255


@pytest.mark.parametrize("kind", ["openpi_torch", "openpi_jax"])
def test_gpu_equals_cpu(kind: AugmentationKind) -> None:
    plan = Augmentation(kind, seed=1, image_size=224, views=("base", "left_wrist", "right_wrist"))
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 256, (32 * 3, 3, 28, 28), generator=generator).float()
    smooth = torch.nn.functional.interpolate(coarse, size=(224, 224), mode="bicubic").clamp(0, 255)
    images_BVCSS = smooth.to(torch.uint8).view(32, 3, 3, 224, 224)
    present = np.ones(3, dtype=bool)
    samples = [{"camera_is_present_BV": present, "sample_index_B": np.int64(i)} for i in range(32)]
    parameters_BVP = torch.from_numpy(np.stack([plan.parameters(sample, 0) for sample in samples]))
    on_cpu = plan.apply(images_BVCSS, parameters_BVP)
    images, parameters = images_BVCSS.cuda(), parameters_BVP.cuda()
    plan.apply(images, parameters)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        on_gpu = plan.apply(images, parameters)
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    print(f"{kind}: {start.elapsed_time(end):.2f} ms for 32 samples of 3 views")
    difference = (on_gpu.cpu() - on_cpu).abs()
    assert float(difference.max()) <= LSB
    assert float(difference.mean()) <= LSB / 1000
