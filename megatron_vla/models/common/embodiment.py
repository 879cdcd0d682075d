"""Layers with weights per embodiment, computed group by group: no sample ever copies a weight.

A micro-batch's samples are sorted into G groups of one embodiment and N places each (metadata made on the host, so shapes are
static). Weights are taken once per group, and one batched product serves all groups.

Shape legend: B samples, K draws of noise, D action chunks, G groups, N samples of one group, S tokens, E embodiments, I input
width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class EmbodimentGroups:
    """embodiment_G: whose weights each group takes; sample_GN: its samples, -1 beyond its end; place_B: places in [G * N]."""

    embodiment_G: Tensor
    sample_GN: Tensor
    place_B: Tensor

    @property
    def is_whole_batch(self) -> bool:
        """One group that the batch fills: its samples are the batch in order. Reads shapes only."""
        return tuple(self.sample_GN.shape) == (1, self.place_B.shape[0])

    def of_draws(self, num_draws: int) -> EmbodimentGroups:
        """Groups of D = B * K chunks, K of each sample in a row."""
        if num_draws == 1:
            return self
        draw_K = torch.arange(num_draws, device=self.place_B.device)
        # A place beyond a group's end stays below zero: -1 becomes -K, and K - 1 is added at most.
        sample_GN = (self.sample_GN.unsqueeze(-1) * num_draws + draw_K).flatten(1)
        place_D = (self.place_B.unsqueeze(-1) * num_draws + draw_K).flatten()
        return EmbodimentGroups(self.embodiment_G, sample_GN, place_D)

    def sort(self, values_B: Tensor) -> Tensor:
        """[B, ...] -> [G, N, ...]; places beyond a group's end repeat sample 0."""
        return values_B[None] if self.is_whole_batch else values_B[self.sample_GN.clamp(min=0)]

    def restore(self, values_GN: Tensor) -> Tensor:
        """[G, N, ...] -> [B, ...]."""
        return values_GN[0] if self.is_whole_batch else values_GN.flatten(0, 1)[self.place_B]


class EmbodimentLinear(nn.Module):
    """x @ weight[embodiment] + bias[embodiment]; weight [E, I, O] (released layout: transposed against torch's Linear)."""

    def __init__(self, num_embodiments: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_embodiments, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(num_embodiments, out_features))

    def forward(self, values_GNSI: Tensor, groups: EmbodimentGroups) -> Tensor:
        """[G, N, S, I] -> [G, N, S, O]."""
        weight_GIO = self.weight.index_select(0, groups.embodiment_G)
        bias_G1O = self.bias.index_select(0, groups.embodiment_G).unsqueeze(1)
        rows_GRI = values_GNSI.flatten(1, 2).to(weight_GIO.dtype)
        return torch.baddbmm(bias_G1O, rows_GRI, weight_GIO).unflatten(1, values_GNSI.shape[1:3])


class EmbodimentMlp(nn.Module):
    """fc2(relu(fc1(x)))."""

    def __init__(self, num_embodiments: int, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = EmbodimentLinear(num_embodiments, in_features, hidden_features)
        self.fc2 = EmbodimentLinear(num_embodiments, hidden_features, out_features)

    def forward(self, values_BSI: Tensor, groups: EmbodimentGroups) -> Tensor:
        """[B, S, I] -> [B, S, O]."""
        return groups.restore(self.fc2(F.relu(self.fc1(groups.sort(values_BSI), groups)), groups))


class EmbodimentActionEncoder(nn.Module):
    """fc3(silu(fc2([fc1(actions), time code]))): action tokens that know the flow time."""

    def __init__(self, num_embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = EmbodimentLinear(num_embodiments, action_dim, width)
        self.fc2 = EmbodimentLinear(num_embodiments, 2 * width, width)
        self.fc3 = EmbodimentLinear(num_embodiments, width, width)

    def forward(self, actions_BSI: Tensor, time_code_BO: Tensor, groups: EmbodimentGroups) -> Tensor:
        """Actions [B, S, I] and time codes [B, O] -> tokens [B, S, O]."""
        embedded = self.fc1(groups.sort(actions_BSI), groups)
        code = groups.sort(time_code_BO).to(embedded.dtype).unsqueeze(2).expand_as(embedded)
        return groups.restore(self.fc3(F.silu(self.fc2(torch.cat((embedded, code), dim=-1), groups)), groups))
