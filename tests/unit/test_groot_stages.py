"""GR00T cut in two at every layer, in one process: both halves hold every weight once and compute what the whole model does."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from groot_model_fixtures import tiny_batch, tiny_config, tiny_model

from megatron_vla.models.groot_n1_7.family import FAMILY
from megatron_vla.models.groot_n1_7.stage import GrootN17Stage, LayerRow
from megatron_vla.optimizations.patterns import select_layers
from megatron_vla.parallel.stage_plan import Chunk, StagePlan

# Other releases lack the vision-language layers; features from all depths, or from none.
CONFIGS: dict[str, dict[str, Any]] = {
    "released": {},
    "no_vision_language_layers": {"vl_num_layers": 0},
    "no_deepstack": {"vision_deepstack_layers": ()},
    "several_draws": {"flow_draws": 3},
    "neither": {"vl_num_layers": 0, "vision_deepstack_layers": (), "vision_num_layers": 1, "num_layers": 1},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_two_halves_are_the_whole(changes: dict[str, Any]) -> None:
    config = tiny_config(tune_llm=True, tune_visual=True, **changes)
    whole, batch = tiny_model(config), tiny_batch(config)
    expected = whole(batch)
    layers = LayerRow.of(config).dit
    num_layers = config.vision_num_layers + config.num_layers + config.vl_num_layers + config.dit_num_layers
    assert layers == num_layers == len(select_layers(whole, FAMILY.block_names))
    every = 1 if "vl_num_layers" in changes else 3
    for cut in range(0, layers + 1, every):
        chunks = (Chunk(0, 0, cut, True, False, 0.0), Chunk(1, cut, layers, False, True, 0.0))
        halves = []
        for number in range(2):
            half = cast(GrootN17Stage, tiny_model(config, kind=GrootN17Stage))
            half.keep(StagePlan(2, chunks), number)
            select_layers(half, FAMILY.block_names)
            halves.append(half)
        names = [{name for name, _ in half.named_parameters()} for half in halves]
        assert names[0].isdisjoint(names[1]), cut
        assert names[0] | names[1] == {name for name, _ in whole.named_parameters()}, cut
        found = halves[1](batch, 0, halves[0](batch))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, msg=f"cut after {cut} layers")
