"""Samples -> one GR00T N1.7 micro-batch, on the host: padding trimmed, images put in a row, metadata added.

A sample is a mapping of arrays named as the batch's fields, without what metadata.py derives:
    tokens_BS int64 [S], token_is_valid_BS bool [S]: left-padded, all samples to one S (--max-prompt-length);
    pixels_PC [P, C]: the patch rows of its images; image_grid_I3 int64 [images, 3]: (time slices, rows, columns) of each;
    state_BHD [H, D], state_is_dropped_B bool, embodiment_B int64, actions_BTA, action_is_valid_BTA [T, A],
    action_dim_is_valid_BA [A], noise_BTA [T, A] and time_B (or one draw after the other, and as many times), sample_index_B,
    epoch_B.

Shape legend: as batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.metadata import Grid, MetadataMaker, RowMetadata, embodiment_groups

STACKED_FIELDS = (
    "state_BHD",
    "state_is_dropped_B",
    "embodiment_B",
    "actions_BTA",
    "action_is_valid_BTA",
    "action_dim_is_valid_BA",
    "noise_BTA",
    "time_B",
    "sample_index_B",
    "epoch_B",
)


class Assembler:
    """`assembler(samples, num_slots)` -> GrootN17Batch.

    num_groups, group_capacity: see `embodiment_groups`; set both when shapes must not depend on the batch.
    """

    def __init__(
        self, config: GrootN17Config, num_groups: int | None = None, group_capacity: int | None = None, **maker_options: Any
    ) -> None:
        self.maker = MetadataMaker(config, **maker_options)
        self.num_groups = num_groups
        self.group_capacity = group_capacity

    def __call__(self, samples: Sequence[Mapping[str, Any]], num_slots: int | None = None) -> GrootN17Batch:
        """One micro-batch of `num_slots` token slots (unset: as many as its longest prompt needs)."""
        tokens_BS, is_valid_BS = self._tokens(samples, num_slots)
        grids = [_grids(sample["image_grid_I3"]) for sample in samples]
        if not all(grids):
            number = int(samples[grids.index([])]["sample_index_B"])
            raise ValueError(
                f"sample {number} has no images: every other DiT block that reads the backbone reads image tokens alone; "
                "give it a camera"
            )
        rows = [self.maker.row(*row) for row in zip(tokens_BS, is_valid_BS, grids, strict=True)]
        vision = self.maker.vision([grid for of_sample in grids for grid in of_sample])
        stacked = {name: torch.from_numpy(np.stack([np.asarray(s[name]) for s in samples])) for name in STACKED_FIELDS}
        groups = embodiment_groups(stacked["embodiment_B"].numpy(), self.num_groups, self.group_capacity)
        return GrootN17Batch(
            tokens_BS=torch.from_numpy(tokens_BS),
            token_is_valid_BS=torch.from_numpy(is_valid_BS),
            pixels_PC=torch.from_numpy(np.concatenate([np.asarray(s["pixels_PC"]) for s in samples])),
            **{name: torch.from_numpy(array) for name, array in vars(vision).items()},
            **_token_places(rows, is_valid_BS),
            group_embodiment_G=torch.from_numpy(groups[0]),
            group_sample_GN=torch.from_numpy(groups[1]),
            sample_place_B=torch.from_numpy(groups[2]),
            **stacked,
        )

    def _tokens(self, samples: Sequence[Mapping[str, Any]], num_slots: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and their masks [B, S], cut on the left where only padding is."""
        tokens_BS = np.stack([np.asarray(sample["tokens_BS"]) for sample in samples])
        is_valid_BS = np.stack([np.asarray(sample["token_is_valid_BS"]) for sample in samples])
        longest = int(is_valid_BS.sum(axis=1).max())
        width = longest if num_slots is None else num_slots
        if not longest <= width <= tokens_BS.shape[1]:
            raise ValueError(f"{width} token slots for prompts of up to {longest} tokens, padded to {tokens_BS.shape[1]}")
        start = tokens_BS.shape[1] - width
        return np.ascontiguousarray(tokens_BS[:, start:]), np.ascontiguousarray(is_valid_BS[:, start:])


def _grids(grid_I3: Any) -> list[Grid]:
    return [(int(frames), int(height), int(width)) for frames, height, width in np.asarray(grid_I3)]


def _token_places(rows: Sequence[RowMetadata], is_valid_BS: np.ndarray) -> dict[str, Tensor]:
    """Token positions, and the places of image tokens and other slots, of all samples."""
    num_slots = is_valid_BS.shape[1]
    image_token_M = np.concatenate([row.image_place_K + number * num_slots for number, row in enumerate(rows)])
    image_BK, image_is_valid_BK = _padded([row.image_place_K for row in rows])
    text_BL, text_is_valid_BL = _padded([row.text_place_L for row in rows])
    text_is_valid_BL &= np.take_along_axis(is_valid_BS, text_BL, axis=1)
    arrays = {
        "image_token_M": image_token_M,
        "token_position_3BS": np.stack([row.position_3S for row in rows], axis=1),
        "image_key_BK": image_BK,
        "image_key_is_valid_BK": image_is_valid_BK,
        "text_key_BL": text_BL,
        "text_key_is_valid_BL": text_is_valid_BL,
    }
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _padded(places: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(places [B, longest], 0 beyond a row's end; bool mask of the true ones)."""
    longest = max(len(row) for row in places)
    padded = np.zeros((len(places), longest), dtype=np.int64)
    is_valid = np.zeros((len(places), longest), dtype=bool)
    for number, row in enumerate(places):
        padded[number, : len(row)] = row
        is_valid[number, : len(row)] = True
    return padded, is_valid
