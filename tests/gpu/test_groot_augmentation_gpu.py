"""GR00T's augmentation on the GPU: the pixels that data workers make, bit by bit, and no waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_vla.data.groot.augmentation import GrootAugmentation, PictureBatch
from megatron_vla.data.groot.pictures import PictureSettings
from megatron_vla.data.groot.resize import resize_area

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RELEASED = PictureSettings("area", 256, 230 / 256, False, 16, 2, 65536, 1 << 24)
AUGMENTATION = GrootAugmentation(3, RELEASED, (0.3, 0.4, 0.5, 0.08))


def samples(number: int, *sizes: tuple[int, int]) -> list[dict[str, np.ndarray]]:
    """Samples of resized pictures of these sizes, smooth enough to have all hues."""
    generator = np.random.default_rng(0)
    made = []
    for index in range(number):
        pictures = []
        for height, width in sizes:
            coarse = generator.integers(0, 256, (1, height // 16, width // 16, 3), dtype=np.uint8)
            pictures.append(resize_area(torch.from_numpy(coarse), height, width).reshape(-1).numpy())
        size_I2 = np.array(sizes, dtype=np.int64)
        made.append({"pictures": np.concatenate(pictures), "picture_size_I2": size_I2, "sample_index_B": np.int64(index)})
    return made


@pytest.mark.parametrize("sizes", [((256, 256), (256, 256)), ((256, 352), (256, 256), (256, 352))], ids=["equal", "ragged"])
def test_gpu_makes_the_workers_pixels(sizes: tuple[tuple[int, int], ...]) -> None:
    chosen = samples(6, *sizes)
    parameters = [AUGMENTATION.parameters(sample, 0) for sample in chosen]
    batch = PictureBatch.of(AUGMENTATION, chosen, parameters).pin_memory()
    on_gpu = AUGMENTATION.apply_to_batch(batch, torch.device("cuda")).cpu()
    on_cpu = np.concatenate([AUGMENTATION.apply_to_sample(dict(sample), 0)["pixels_PC"] for sample in chosen])
    np.testing.assert_array_equal(on_gpu.numpy(), on_cpu)


def test_nothing_waits_for_the_device() -> None:
    chosen = samples(4, (256, 256), (256, 256))
    batch = PictureBatch.of(AUGMENTATION, chosen, [AUGMENTATION.parameters(sample, 0) for sample in chosen]).pin_memory()
    device = torch.device("cuda", torch.cuda.current_device())
    first = AUGMENTATION.apply_to_batch(batch, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = AUGMENTATION.apply_to_batch(batch, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
