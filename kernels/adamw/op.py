"""Launching the AdamW kernel: a table of addresses per set of gradients, and the conditions under which it can run.

Called outside of compiled regions and in place, so it is a plain function and not a torch custom op: through the dispatcher,
five lists of 800 tensors would cost more host time than the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vla.kernels import launch, load_launcher
from megatron_vla.kernels.adamw.reference import Coefficients
from megatron_vla.kernels.tensor_table import AddressTable, BlockMap

_LAUNCHER = load_launcher("adamw")
IS_BUILT = _LAUNCHER is not None
# Elements of one block: 16 pieces of 2048 (512 threads on four elements). The base model then has about 100,000 blocks.
CHUNK = 32768
_WORDS_PER_ROW = 8
_BYTES_PER_VECTOR = {torch.float32: 16, torch.bfloat16: 8}


@dataclass(frozen=True)
class AdamWTensors:
    """One parameter: fp32 main and moments, and the bf16 weight that follows the main parameter (None: it is the weight)."""

    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor | None


def can_run(tensors: AdamWTensors, gradient_dtype: torch.dtype) -> bool:
    """Whether the kernel takes this parameter: CUDA, contiguous, fp32 state, fp32 or bf16 gradient and weight."""
    state = (tensors.main, tensors.exp_avg, tensors.exp_avg_sq)
    weight = tensors.weight
    return (
        IS_BUILT
        and gradient_dtype in _BYTES_PER_VECTOR
        and all(t.is_cuda and t.is_contiguous() and t.dtype == torch.float32 for t in state)
        and (weight is None or (weight.is_cuda and weight.is_contiguous() and weight.dtype == torch.bfloat16))
    )


class FusedAdamW:
    """The update of a fixed list of parameters; gradients may lie elsewhere at every call.

    The kernel notes which pieces have moments of zero. It reads only their gradient, as long as that is zero and the update
    changes nothing. Whoever else writes to moments, main parameters or weights calls `forget_moments` before the next step.
    """

    def __init__(self, parameters: Sequence[AdamWTensors], betas: tuple[float, float], eps: float):
        assert _LAUNCHER is not None and parameters
        self._launcher = _LAUNCHER.adamw_launch
        self._launcher.argtypes = [
            *([ctypes.c_void_p] * 3),
            ctypes.c_int,
            ctypes.c_int64,
            *([ctypes.c_void_p] * 6),
            *([ctypes.c_float] * 5),
            ctypes.c_void_p,
        ]
        self._parameters = tuple(parameters)
        self._constants = (*betas, 1 - betas[0], 1 - betas[1], eps)
        self._blocks = BlockMap([p.main.numel() for p in parameters], CHUNK, parameters[0].main.device)
        self._table = AddressTable()
        # `struct Known` of csrc/adamw.cu. One address for good, as a captured graph writes there.
        self._known = torch.zeros(self._blocks.num_blocks, 2, dtype=torch.int32, device=parameters[0].main.device)

    def forget_moments(self) -> None:
        """At the next step every piece is updated, as at the first."""
        self._known.zero_()

    def num_untouched_pieces(self) -> int:
        """Pieces whose moments are known to be zero (waits for the device)."""
        bits = torch.arange(32, device=self._known.device)
        return int((self._known[:, :1] >> bits & 1).sum())

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], scale: Tensor, coefficients: Coefficients, keep: Tensor | None) -> None:
        """Update in place. gradients: one per parameter, of its shape, contiguous, fp32 or bf16; never written.

        scale: shape [], fp32, multiplies every gradient. keep: shape [], bool; where False nothing changes.
        """
        assert len(gradients) == len(self._parameters)
        table = self._table.of(gradients, lambda: self._rows(gradients))
        scalars = (coefficients.decay, scale, coefficients.bias_correction2_sqrt, coefficients.negative_step_size)
        assert all(s.dtype == torch.float32 and s.numel() == 1 for s in scalars)
        assert keep is None or keep.dtype == torch.bool
        launch(
            self._launcher,
            table.device,
            table.data_ptr(),
            *self._blocks.arguments(),
            self._known.data_ptr(),
            *(s.data_ptr() for s in scalars),
            None if keep is None else keep.data_ptr(),
            *self._constants,
        )

    def _rows(self, gradients: Sequence[Tensor]) -> list[int]:
        words: list[int] = []
        for tensors, gradient in zip(self._parameters, gradients, strict=True):
            assert gradient.is_contiguous() and gradient.shape == tensors.main.shape, (
                "gradients must be laid out like the state"
            )
            words += _row(tensors, gradient)
        return words


def _row(tensors: AdamWTensors, gradient: Tensor) -> list[int]:
    """One row of the table, as `struct Row` of csrc/adamw.cu."""
    weight = tensors.weight
    vectors = [(t, 16) for t in (tensors.main, tensors.exp_avg, tensors.exp_avg_sq)]
    vectors += [(gradient, _BYTES_PER_VECTOR[gradient.dtype])] + ([] if weight is None else [(weight, 8)])
    is_aligned = all(t.data_ptr() % size == 0 for t, size in vectors)
    row = [tensors.main.data_ptr(), tensors.exp_avg.data_ptr(), tensors.exp_avg_sq.data_ptr(), gradient.data_ptr()]
    row += [0 if weight is None else weight.data_ptr(), tensors.main.numel(), gradient.dtype == torch.bfloat16, is_aligned]
    assert len(row) == _WORDS_PER_ROW
    return row
