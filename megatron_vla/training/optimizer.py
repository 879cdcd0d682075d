"""AdamW with fp32 main parameters, all of whose step-dependent numbers live on the device.

Decoupled decay and bias correction are those of torch.optim.AdamW (arXiv:1711.05101), in its order of operations. The update
is one function over lists of flat tensors: whole parameters here, shards of contiguous buffers just as well. Learning rate and
step are device scalars, so that a captured graph can replay the update with new values, and a non-finite step becomes an exact
no-op (moments, decay and parameters untouched) without the host looking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.kernels.adamw.op import IS_BUILT, AdamWTensors, FusedAdamW, can_run
from megatron_vla.kernels.adamw.reference import Coefficients, adamw_update
from megatron_vla.parallel.owned_part import OwnedPart, OwnerRule, whole_part
from megatron_vla.parallel.parameter_shard import is_decayed
from megatron_vla.training.state_shard import StateKind, StateShard

# Bounds the temporary copies of an update (256 MiB in fp32); the embedding of a 3 B model alone has 5e8 elements.
PIECE_ELEMENTS = 2**26


@dataclass
class OptimizedParameter:
    """The part of one parameter that this rank updates, and its state, all of `part.weight`'s shape.

    `main` is the model's own storage when that is already fp32 or fp64. exp_avg and exp_avg_sq are None for a `decay_only`
    parameter: its gradient is exactly zero, so its moments stay zero.
    """

    name: str
    part: OwnedPart
    main: Tensor
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None

    @property
    def parameter(self) -> nn.Parameter:
        """The model's parameter."""
        return self.part.parameter

    @property
    def has_own_main(self) -> bool:
        """Whether the main parameter is a copy in higher precision."""
        return self.main.dtype != self.part.weight.dtype


def main_dtype(parameter: Tensor) -> torch.dtype:
    """Dtype of the main parameter and the moments: fp32, or fp64 for an fp64 parameter."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def is_decay_only(parameter: Tensor) -> bool:
    """Whether a family marked the parameter as live for weight decay and for nothing else."""
    return bool(getattr(parameter, "decay_only", False))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Flat views of at most PIECE_ELEMENTS elements."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE_ELEMENTS)
    else:
        yield tensor


def _batches(sizes: Sequence[int]) -> list[slice]:
    """Consecutive runs of pieces of at most PIECE_ELEMENTS elements together."""
    runs: list[slice] = []
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and total + size > PIECE_ELEMENTS:
            runs.append(slice(start, position))
            start, total = position, 0
        total += size
    if start < len(sizes):
        runs.append(slice(start, len(sizes)))
    return runs


class AdamW:
    """AdamW over named parameters: those that require a gradient, and `decay_only` ones. Others are left alone.

    owned_part says which elements of a parameter this rank updates (a wrapped model's `owned_part`): whole parameters, shards
    of contiguous buffers and local parts of DTensors all go through the same update. may_be_empty: allow a model of which
    nothing is trained (a frozen pipeline stage). Step counts are kept once, in the
    parameter group (`param_groups[0]["step"]`), never per parameter.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        owned_part: OwnerRule = whole_part,
        *,
        may_be_empty: bool = False,
    ):
        self.config = config
        self.betas = (config.adam_beta1, config.adam_beta2)
        self.parameters: list[OptimizedParameter] = []
        num_live = 0
        device = torch.device("cpu")
        for name, parameter in named_parameters:
            device = parameter.device
            if not (parameter.requires_grad or is_decay_only(parameter)):
                continue
            num_live += 1
            part = owned_part(parameter)
            if part is None:
                continue
            main = part.weight.to(main_dtype(parameter))  # the weight itself when it has that dtype
            moments = (torch.zeros_like(main), torch.zeros_like(main)) if parameter.requires_grad else (None, None)
            self.parameters.append(OptimizedParameter(name, part, main, *moments))
        # A rank of a small sharded model may own nothing; it still counts steps and takes part in collectives.
        if not num_live and not may_be_empty:
            raise ValueError("the optimizer was given no trainable parameter")
        # Both kernels read each tensor once, and skip a refused step without its gradients having been zeroed.
        self.is_fused = config.fused_adam and all(p.main.is_cuda and p.main.dtype == torch.float32 for p in self.parameters)
        self._kernels = self._build_kernels() if self.is_fused else None
        self.param_groups: list[dict[str, Any]] = [{"step": 0, "lr": 0.0, "params": [p.parameter for p in self.parameters]}]
        # fp64 scalars: 1 - beta2**step loses half its digits in fp32 during the first steps.
        self._lr = torch.zeros((), dtype=torch.float64, device=device)
        self._step = torch.zeros((), dtype=torch.float64, device=device)

    def _build_kernels(self) -> dict[bool, FusedAdamW] | None:
        """This project's kernel, which also rounds the weights, for what decays and what does not.

        None where it was not built or a tensor's layout forbids it.
        """
        rows: dict[bool, list[AdamWTensors]] = {}
        for entry in self.trainable:
            assert entry.exp_avg is not None and entry.exp_avg_sq is not None
            row = AdamWTensors(entry.main, entry.exp_avg, entry.exp_avg_sq, entry.part.weight if entry.has_own_main else None)
            if not can_run(row, entry.part.gradient_dtype):
                return None
            rows.setdefault(is_decayed(entry.parameter), []).append(row)
        return {decays: FusedAdamW(r, self.betas, self.config.adam_eps) for decays, r in rows.items()} or None

    @property
    def kernel_name(self) -> str:
        """Which code makes the update, for the log."""
        if not self.is_fused:
            return "PyTorch operations"
        if self._kernels is not None:
            return "one fused kernel"
        why = "layout or dtype of a parameter" if IS_BUILT else "kernels/adamw was not built"
        return f"torch's fused kernel ({why})" if self.parameters else "nothing to update on this rank"

    @property
    def trainable(self) -> list[OptimizedParameter]:
        """Parameters with moments, in the model's order."""
        return [p for p in self.parameters if p.exp_avg is not None]

    def gradients(self) -> list[Tensor]:
        """Gradients of this rank's parts, one per entry of `trainable`; valid after finish_gradients."""
        return [entry.part.read_gradient() for entry in self.trainable]

    def advance(self, learning_rate: float) -> None:
        """Host side of a step: count it and put its learning rate on the device (outside any captured region)."""
        group = self.param_groups[0]
        group["step"] += 1
        group["lr"] = learning_rate
        self._lr.fill_(learning_rate)
        self._step.fill_(group["step"])

    def _coefficients(self, is_finite: Tensor | None) -> dict[torch.dtype, Coefficients]:
        """Step-dependent scalars in each main dtype, made so that a refused step changes nothing."""
        beta1, beta2 = self.betas
        values = {
            "decay": 1 - self._lr * self.config.weight_decay,
            "beta1": torch.full_like(self._lr, beta1),
            "beta2": torch.full_like(self._lr, beta2),
            "bias_correction2_sqrt": (1 - torch.pow(beta2, self._step)).sqrt(),
            "negative_step_size": -self._lr / (1 - torch.pow(beta1, self._step)),
        }
        if is_finite is not None:
            # A step size of 0 makes the denominator infinite and the quotient exactly 0; of -0, a first moment of 0 (rows of an
            # embedding that no batch has named) gives -0, which leaves a parameter of -0 as it is.
            neutral = {"decay": 1.0, "beta1": 1.0, "beta2": 1.0, "bias_correction2_sqrt": 1.0, "negative_step_size": -0.0}
            values = {k: torch.where(is_finite, v, neutral[k]) for k, v in values.items()}
        dtypes = {p.main.dtype for p in self.parameters}
        return {d: Coefficients(**{k: v.to(d) for k, v in values.items()}) for d in dtypes}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], gradient_scale: Tensor, is_finite: Tensor | None = None) -> None:
        """Device side of a step, after `advance`.

        gradients: one per entry of `trainable`, any float dtype; those of the main dtype are scaled in place.
        gradient_scale: shape [], one over the global number of valid elements times the clip factor.
        is_finite: shape [], bool. Where False the whole step is a no-op; unless `is_fused`, the caller has set such gradients
        to zero.
        """
        trainable = self.trainable
        assert len(gradients) == len(trainable), (len(gradients), len(trainable))
        coefficients = self._coefficients(is_finite)
        for dtype, scalars in coefficients.items():
            for decays in (True, False):
                pairs = zip(trainable, gradients, strict=True)
                chosen = [(p, g) for p, g in pairs if p.main.dtype == dtype and is_decayed(p.parameter) == decays]
                used = scalars if decays else replace(scalars, decay=torch.ones_like(scalars.decay))
                if not chosen:
                    continue
                if self._kernels is not None:
                    self._kernels[decays].step([g for _, g in chosen], gradient_scale.float(), used, is_finite)
                elif self.is_fused:
                    self._update_fused(chosen, gradient_scale, is_finite, self.config.weight_decay if decays else 0.0)
                else:
                    self._update(chosen, used, gradient_scale.to(dtype))
            decayed = [p.main for p in self.parameters if p.exp_avg is None and p.main.dtype == dtype]
            if decayed:
                torch._foreach_mul_(decayed, scalars.decay)
        self._write_weights([p for p in self.parameters if self._kernels is None or p.exp_avg is None])

    def write_weights(self) -> None:
        """Round the main parameters into the model, where they are copies. Sharded: this rank's part only."""
        self._forget_moments()
        self._write_weights(self.parameters)

    def _forget_moments(self) -> None:
        """Whoever is handed live state, or asks for copies between main parameters and weights, may have changed it: what the
        kernel knows about moments of zero is no longer certain."""
        for kernel in (self._kernels or {}).values():
            kernel.forget_moments()

    @torch.no_grad()
    def _write_weights(self, entries: Sequence[OptimizedParameter]) -> None:
        lowered = [p for p in entries if p.has_own_main]
        if lowered:
            torch._foreach_copy_([p.part.weight for p in lowered], [p.main for p in lowered])

    def _update(self, chosen: list[tuple[OptimizedParameter, Tensor]], scalars: Coefficients, scale: Tensor) -> None:
        """AdamW on the pieces of the chosen parameters, a bounded number of elements at a time."""
        columns: list[list[Tensor]] = [[], [], [], []]
        for state, gradient in chosen:
            assert state.exp_avg is not None and state.exp_avg_sq is not None
            # All four must be cut alike, so one non-contiguous member keeps the parameter whole.
            row = (state.main, gradient, state.exp_avg, state.exp_avg_sq)
            split = all(t.is_contiguous() for t in row)
            for column, tensor in zip(columns, row, strict=True):
                column.extend(_pieces(tensor) if split else [tensor])
        mains, grads, exp_avgs, exp_avg_sqs = columns
        for run in _batches([t.numel() for t in mains]):
            scaled = [g.to(m.dtype) for g, m in zip(grads[run], mains[run], strict=True)]
            torch._foreach_mul_(scaled, scale)
            adamw_update(mains[run], scaled, exp_avgs[run], exp_avg_sqs[run], scalars, self.betas, self.config.adam_eps)

    def _update_fused(
        self,
        chosen: list[tuple[OptimizedParameter, Tensor]],
        gradient_scale: Tensor,
        is_finite: Tensor | None,
        weight_decay: float,
    ) -> None:
        """The same update by torch's multi-tensor kernel: each tensor is read and written once.

        Used where kernels/adamw was not built. Pi0.5 base on an H200, 3.2e9 parameters: 32 ms, and 51 ms less per step than
        with one kernel per operation.
        """
        states, gradients = zip(*chosen, strict=True)
        mains = [state.main for state in states]
        wide = [gradient.to(main.dtype) for gradient, main in zip(gradients, mains, strict=True)]
        step = self._step.float()
        torch._fused_adamw_(
            mains,
            wide,
            [state.exp_avg for state in states],
            [state.exp_avg_sq for state in states],
            [],
            [step] * len(mains),
            lr=self._lr.float(),
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=gradient_scale.reciprocal().float(),  # the kernel divides by it
            found_inf=None if is_finite is None else (~is_finite).float(),  # 1: the kernel returns at once
        )

    def state_shards(self) -> Iterator[StateShard]:
        """This rank's main parameters and moments, live. Loading copies into the tensors, then calls `write_weights`."""
        self._forget_moments()
        for entry in self.parameters:
            states: dict[StateKind, Tensor | None] = {
                "main": entry.main,
                "exp_avg": entry.exp_avg,
                "exp_avg_sq": entry.exp_avg_sq,
            }
            for kind, tensor in states.items():
                if tensor is not None:
                    yield StateShard(kind, entry.name, tensor, entry.part.flat_range, entry.part.local_shape)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a resume needs, keyed by parameter name: `main.X` (when not the weight itself) and the moments.

        Raises ValueError on a rank that holds true parts only: see `state_shards`.
        """
        self._forget_moments()
        tensors: dict[str, Tensor] = {}
        for entry in self.parameters:
            if entry.part.flat_range != (0, math.prod(entry.part.local_shape)):
                raise ValueError(f"this rank holds only elements {entry.part.flat_range} of {entry.name}'s optimizer state")
            if entry.has_own_main:
                tensors[f"main.{entry.name}"] = entry.main
            if entry.exp_avg is not None and entry.exp_avg_sq is not None:
                tensors[f"exp_avg.{entry.name}"] = entry.exp_avg
                tensors[f"exp_avg_sq.{entry.name}"] = entry.exp_avg_sq
        return tensors

    @torch.no_grad()
    def refresh_main(self) -> None:
        """Take the main parameters from the model again, after weights were loaded without optimizer state."""
        self._forget_moments()
        for entry in self.parameters:
            if entry.has_own_main:
                entry.main.copy_(entry.part.weight)
