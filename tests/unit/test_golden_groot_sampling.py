"""GR00T N1.7's sampling, positions and time codes against golden numbers.

Shape legend: as megatron_vla/models/groot_n1_7/batch.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from groot_model_fixtures import CASE_NAMES, GOLDEN, golden_batch, golden_case, golden_model, load_stem
from pi05_fixtures import relative_difference
from torch import Tensor

from megatron_vla.models.common.flow_matching import integer_time_code
from megatron_vla.models.common.rotary import plane_rotary_table, sectioned_rotary_table
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.metadata import MetadataMaker, grid_positions, row_metadata
from megatron_vla.models.groot_n1_7.sampling import PreviousChunk, sample_actions


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_sampled_actions(name: str, dtype: torch.dtype, limit: float) -> None:
    case = golden_case(name)
    golden, inputs = case.tensors("infer_fp64"), case.tensors("inputs")
    model, batch = golden_model(case, dtype).eval(), golden_batch(case)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    original = model.cached_velocity

    def recorded(batch: Any, memory: Any, cached: Any, x_BTA: Tensor, step_B: Tensor) -> Tensor:
        velocity_BTA = original(batch, memory, cached, x_BTA, step_B)
        steps.append((x_BTA, step_B, velocity_BTA))
        return velocity_BTA

    model.cached_velocity = recorded  # type: ignore[method-assign]
    actions_BTA = sample_actions(model, batch, case.config.num_inference_steps, inputs["infer_noise"])
    assert relative_difference(actions_BTA, golden["actions"]) <= limit
    assert torch.equal(torch.stack([s[1][0] for s in steps]), golden["timestep_all"])
    assert relative_difference(torch.stack([s[2] for s in steps]), golden["pred_all"]) <= limit
    assert relative_difference(torch.stack([s[0] for s in steps]), golden["x_all"]) <= limit
    options = case.numbers["rtc_options"]
    previous = PreviousChunk(
        inputs["rtc_previous_chunk"], options["rtc_overlap_steps"], options["rtc_frozen_steps"], options["rtc_ramp_rate"]
    )
    continued_BTA = sample_actions(model, batch, case.config.num_inference_steps, inputs["infer_noise"], previous)
    assert relative_difference(continued_BTA, golden["rtc_actions"]) <= limit


def test_cached_keys_and_values_change_nothing() -> None:
    case = golden_case(CASE_NAMES[0])
    model, batch = golden_model(case).eval(), golden_batch(case)
    with torch.no_grad():
        memory = model.memory(batch, model.backbone(batch))
        x_BTA, step_B = batch.noise_BTA.double(), model.time_step(batch.time_B)
        plain = model.velocity(batch, memory, x_BTA, step_B)
        cached = model.cached_velocity(batch, memory, model.cached_memory(memory), x_BTA, step_B)
    assert torch.equal(plain, cached)


def test_previous_chunk_is_checked() -> None:
    with pytest.raises(ValueError, match="3 frozen and 2 overlapping steps of a chunk of 4"):
        PreviousChunk(torch.zeros(1, 4, 2), overlap=2, frozen=3)


def test_position_table_interpolation() -> None:
    golden = load_stem(GOLDEN / "positions", "positions")
    parts = [grid_positions(tuple(grid), 48, 2) for grid in golden["grids"].tolist()]
    tables, weights, places = (
        np.concatenate(part, axis=axis) for part, axis in zip(zip(*parts, strict=True), (1, 1, 0), strict=True)
    )
    assert torch.equal(torch.from_numpy(tables.T), golden["interp_indices"])
    assert torch.equal(torch.from_numpy(weights.T), golden["interp_weights"])
    assert torch.equal(torch.from_numpy(places), golden["vision_rope_position_ids"])
    result = (golden["interp_table"][torch.from_numpy(tables)] * torch.from_numpy(weights)[..., None]).sum(dim=0)
    assert relative_difference(result, golden["interp_result"]) <= 1e-6
    rotary = plane_rotary_table(torch.from_numpy(places)[None], 64, 10000.0, torch.float32)
    for part, table in (("cos", rotary.cos_B1SD), ("sin", rotary.sin_B1SD)):
        assert relative_difference(torch.cat((table[0, 0], table[0, 0]), dim=-1), golden[f"vision_rope_{part}"]) <= 1e-6


def test_rotary_positions_of_prompts() -> None:
    golden = load_stem(GOLDEN / "positions", "positions")
    settings = json.loads((GOLDEN / "positions" / "positions.json").read_text())
    grids = [tuple(grid) for grid in golden["mrope.image_grid_thw"].tolist()]
    tokens_BS, is_valid_BS = golden["mrope.input_ids"].numpy(), golden["mrope.attention_mask"].bool().numpy()
    positions = []
    for row, count in enumerate(settings["images_per_row"]):
        own, grids = grids[:count], grids[count:]
        positions.append(row_metadata(tokens_BS[row] == 151655, is_valid_BS[row], own, 2).position_3S)
    position_3BS = torch.from_numpy(np.stack(positions, axis=1))
    assert torch.equal(position_3BS, golden["mrope.position_ids"])
    rope = settings["text_rope"]
    table = sectioned_rotary_table(position_3BS, rope["sections"], rope["head_dim"], rope["theta"], torch.float32)
    for part, half in (("cos", table.cos_B1SD), ("sin", table.sin_B1SD)):
        expected = golden[f"mrope.last40_{part}"]
        doubled = torch.cat((half[:, 0], half[:, 0]), dim=-1)[:, -expected.shape[1] :]
        assert relative_difference(doubled, expected) <= 4e-6


def test_time_codes() -> None:
    golden = load_stem(GOLDEN / "positions", "time_codes")
    step_N = golden["timestep"]
    for width, stem in ((1536, "action_code_dim1536"), (48, "action_code_dim48")):
        code = integer_time_code(step_N, width, width // 2, torch.float64, cosines_first=False)
        assert relative_difference(code, golden[stem]) <= 1e-4  # fp32 angles there
    code = integer_time_code(step_N, 256, 127, torch.float64, cosines_first=True)
    assert relative_difference(code, golden["dit_code"]) <= 1e-4
    assert torch.equal((golden["t"] * 1000).long(), golden["t_bucket"])


def test_metadata_is_made_once_per_layout() -> None:
    maker = MetadataMaker(GrootN17Config(), cache_size=2)
    image, other = [(1, 4, 4)], [(1, 4, 6)]
    first = maker.vision(image)
    assert maker.vision([(1, 4, 4)]) is first and (maker.grids.hits, maker.grids.misses) == (1, 1)
    tokens_S = np.array([5, 151655, 151655, 151655, 151655, 9])
    row = maker.row(tokens_S, np.ones(6, dtype=bool), image)
    assert maker.row(np.where(tokens_S == 9, 8, tokens_S), np.ones(6, dtype=bool), image) is row  # another word
    assert maker.hit_rate == 0.5
    for grids in (other, [*image, *other]):
        maker.vision(grids)
    assert maker.vision(image) is not first  # dropped: the cache is bounded
    with pytest.raises(ValueError, match=r"holds 4 image tokens, its image grids .* need 6"):
        maker.row(tokens_S, np.ones(6, dtype=bool), other)
    with pytest.raises(ValueError, match="positive multiples of 2"):
        maker.vision([(1, 3, 4)])
