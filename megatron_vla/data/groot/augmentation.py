"""GR00T's training augmentation: one random crop for all pictures of a sample, then colour jitter, from explicit parameters.

Parameters are pure functions of (seed, epoch, sample). A data worker applies them to one sample, or they travel with the
resized pictures and the training device applies them to a whole micro-batch; both give the same pixels (a last resize to the
vision tower's multiples, which 256 x 256 pictures do not need, may differ by a level on a GPU). Source: spec of GR00T N1.7,
section 5.4.

Shape legend: I pictures, H height, W width, C 3 channels, P patches, D values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vla.data.draws import AUGMENT_STREAM, sample_generator
from megatron_vla.data.groot.colour import OPERATIONS, jitter, jitter_alike
from megatron_vla.data.groot.pictures import PictureSettings
from megatron_vla.data.groot.preprocess import PICTURE_SIZES, PICTURES
from megatron_vla.data.groot.resize import cut_windows

# Columns of the parameters: place of the crop as shares of the slack, factors, and the operation at each place.
NUM_PARAMETERS = 2 + 2 * len(OPERATIONS)


@dataclass(frozen=True)
class GrootAugmentation:
    """`ranges`: of brightness, contrast, saturation and hue; empty for a crop alone."""

    seed: int
    pictures: PictureSettings
    ranges: tuple[float, ...]

    def parameters(self, arrays: Mapping[str, Any], epoch: int) -> np.ndarray:
        """float64 [NUM_PARAMETERS] of one sample."""
        generator = sample_generator(self.seed, AUGMENT_STREAM, epoch, int(arrays["sample_index_B"]))
        places = generator.random(2)
        if not self.ranges:
            return np.concatenate([places, np.ones(len(OPERATIONS)), np.arange(len(OPERATIONS))])
        spread = np.asarray(self.ranges)
        centre = np.array([1.0, 1.0, 1.0, 0.0])  # hue is a shift, the others are factors
        factors = generator.uniform(centre - spread, centre + spread)
        return np.concatenate([places, factors, generator.permutation(len(OPERATIONS))])

    def window(self, size: Sequence[int], parameters: np.ndarray) -> tuple[int, int]:
        """(top, left) of the crop of a resized picture."""
        rows, columns = self.pictures.window(size[0], size[1])
        return int((size[0] - rows + 1) * parameters[0]), int((size[1] - columns + 1) * parameters[1])

    def apply_to_sample(self, arrays: dict[str, Any], epoch: int) -> dict[str, Any]:
        """Resized pictures -> patch rows."""
        parameters, arrays = self.parameters(arrays, epoch), dict(arrays)
        flat, sizes = torch.from_numpy(arrays.pop(PICTURES)), arrays.pop(PICTURE_SIZES).tolist()
        patches, start = [], 0
        for height, width in sizes:
            picture = flat[start : start + 3 * height * width].view(1, height, width, 3)
            start += 3 * height * width
            crop = self.pictures.cropped(picture, *self.window((height, width), parameters))
            if self.ranges:
                crop = jitter_alike(crop, parameters[2:6].tolist(), parameters[6:].astype(int).tolist())
            patches.append(self.pictures.patches(crop))
        return {**arrays, "pixels_PC": torch.cat(patches).numpy()}

    def apply_to_batch(self, batch: PictureBatch, device: torch.device) -> Tensor:
        """uint8 [P, D] of all pictures in order, on `device`; nothing is read back."""
        flat = batch.flat.to(device, non_blocking=True)
        parts: list[Tensor | None] = [None] * len(batch.sizes)
        for (height, width), numbers in batch.groups().items():
            windows_N2 = batch.chosen(batch.windows_I2, numbers).to(device, non_blocking=True)
            pictures_NHWC = batch.stacked(flat, numbers, height, width)
            rows, columns = self.pictures.window(height, width)
            # Windows differ in place only, so the second resize is one call.
            crops = self.pictures.resize(cut_windows(pictures_NHWC, windows_N2[:, 0], windows_N2[:, 1], rows, columns))
            if self.ranges:
                factors_N4 = batch.chosen(batch.factors_I4, numbers).to(device, non_blocking=True)
                crops = jitter(crops, factors_N4, batch.chosen(batch.orders_I4, numbers).to(device, non_blocking=True))
            patches = self.pictures.patches(crops)
            if len(numbers) == len(batch.sizes):
                return patches
            for number, rows_PD in zip(numbers, patches.chunk(len(numbers)), strict=True):
                parts[number] = rows_PD
        return torch.cat([part for part in parts if part is not None])


@dataclass
class PictureBatch:
    """Resized pictures of a micro-batch end to end, and what is done to each: LoadedBatch.pending.

    flat uint8; sizes (height, width) of each; windows_I2 int64 (top, left); factors_I4 float64; orders_I4 int64.
    """

    augmentation: GrootAugmentation
    flat: Tensor
    sizes: list[tuple[int, int]]
    windows_I2: Tensor
    factors_I4: Tensor
    orders_I4: Tensor

    @staticmethod
    def of(
        augmentation: GrootAugmentation, samples: Sequence[Mapping[str, Any]], parameters: Sequence[np.ndarray]
    ) -> PictureBatch:
        """Of samples with pictures, and the parameters of each."""
        sizes = [tuple(size) for sample in samples for size in np.asarray(sample[PICTURE_SIZES]).tolist()]
        of_picture = [p for p, sample in zip(parameters, samples, strict=True) for _ in sample[PICTURE_SIZES]]
        windows = [augmentation.window(size, p) for size, p in zip(sizes, of_picture, strict=True)]
        stacked = np.stack(of_picture)
        return PictureBatch(
            augmentation,
            torch.from_numpy(np.concatenate([np.asarray(sample[PICTURES]) for sample in samples])),
            sizes,
            torch.tensor(windows, dtype=torch.int64),
            torch.from_numpy(np.ascontiguousarray(stacked[:, 2:6])),
            torch.from_numpy(stacked[:, 6:].astype(np.int64)),
        )

    def groups(self) -> dict[tuple[int, int], list[int]]:
        """Size -> numbers of the pictures that have it."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(self.sizes):
            groups.setdefault(size, []).append(number)
        return groups

    def chosen(self, tensor: Tensor, numbers: list[int]) -> Tensor:
        """Rows of a host tensor; all of them as they are, since a copy would not be page-locked."""
        return tensor if len(numbers) == len(self.sizes) else tensor[numbers]

    def stacked(self, flat: Tensor, numbers: Sequence[int], height: int, width: int) -> Tensor:
        """uint8 [N, H, W, C] of pictures of one size."""
        if len(numbers) == len(self.sizes):
            return flat.view(-1, height, width, 3)
        starts = np.concatenate([[0], np.cumsum([3 * h * w for h, w in self.sizes])]).tolist()
        return torch.stack([flat[starts[n] : starts[n + 1]].view(height, width, 3) for n in numbers])

    def pin_memory(self) -> PictureBatch:
        """The same in page-locked memory."""
        tensors = (self.windows_I2, self.factors_I4, self.orders_I4)
        return PictureBatch(self.augmentation, self.flat.pin_memory(), self.sizes, *(t.pin_memory() for t in tensors))

    def finish(self, batch: Any, device: torch.device) -> None:
        """Put the patch rows into the micro-batch."""
        batch.pixels_PC = self.augmentation.apply_to_batch(self, device)
