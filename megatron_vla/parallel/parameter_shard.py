"""What part of a parameter this rank holds: the one description that initialisation, loading, saving and norms read.

A parameter without the attribute `shard` is whole. More marks, set beside it where they apply (absent = False):

tensor_parallel_partial: the parameter is whole on every tensor-parallel rank, but each rank's gradient only covers its own
    tokens or heads; the true gradient is the sum over the tensor-parallel group.
pipeline_shared: the parameter lives on several pipeline stages; the true gradient is the sum over the pipeline group.
not_decayed: weight decay leaves it alone.

The functions below are the only readers of the marks; nothing else asks a parameter for optional attributes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterShard:
    """`size` ranks cut a tensor of `global_shape` along `dim`; this is part number `rank`. `dim` None: all hold all of it.

    Parts differ by at most one row when the length does not divide; the first ones are the longer ones.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    rank: int = 0
    size: int = 1

    @property
    def start(self) -> int:
        """First row of `dim` that this rank holds (0 when whole)."""
        return 0 if self.dim is None else first_row(self.global_shape[self.dim], self.rank, self.size)

    @property
    def stop(self) -> int:
        """One past the last row of `dim` that this rank holds."""
        if self.dim is None:
            raise ValueError("a whole parameter has no cut dimension")
        return first_row(self.global_shape[self.dim], self.rank + 1, self.size)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.dim is None:
            return self.global_shape
        return (*self.global_shape[: self.dim], self.stop - self.start, *self.global_shape[self.dim + 1 :])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins in the global tensor, one number per dimension."""
        return tuple(self.start if axis == self.dim else 0 for axis in range(len(self.global_shape)))

    def local_part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor (a view)."""
        if tuple(tensor.shape) != self.global_shape:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not the whole of {self.global_shape}")
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.stop - self.start)


def first_row(length: int, rank: int, size: int) -> int:
    """Where part `rank` of `length` rows begins (`rank` = `size` gives `length`)."""
    return rank * (length // size) + min(rank, length % size)


def shard_of(parameter: Tensor) -> ParameterShard:
    """The parameter's shard; a whole parameter's own shape when it is not marked."""
    shard = getattr(parameter, "shard", None)
    return ParameterShard(tuple(parameter.shape)) if shard is None else shard


def is_tensor_parallel_partial(parameter: Tensor) -> bool:
    """Whether the gradient still has to be summed over the tensor-parallel group."""
    return bool(getattr(parameter, "tensor_parallel_partial", False))


def is_pipeline_shared(parameter: Tensor) -> bool:
    """Whether the gradient still has to be summed over the pipeline group."""
    return bool(getattr(parameter, "pipeline_shared", False))


def mark_shard(parameter: nn.Parameter, shard: ParameterShard) -> None:
    """Attach `shard`. Raises ValueError when the parameter does not have the part's shape."""
    if tuple(parameter.shape) != shard.local_shape:
        raise ValueError(
            f"parameter of shape {tuple(parameter.shape)} marked as part {shard.local_shape} of {shard.global_shape}"
        )
    parameter.shard = shard  # type: ignore[attr-defined]


def mark_partial(module: nn.Module) -> None:
    """Mark every parameter of `module` as whole with a partial gradient."""
    for parameter in module.parameters():
        parameter.tensor_parallel_partial = True  # type: ignore[attr-defined]


MARKS = ("shard", "tensor_parallel_partial", "pipeline_shared", "decay_only", "not_decayed")


def is_decayed(parameter: Tensor) -> bool:
    """Whether weight decay acts on the parameter; a family's recipe may leave biases and norms out (`not_decayed`)."""
    return not getattr(parameter, "not_decayed", False)


def mark_not_decayed(parameter: nn.Parameter) -> None:
    """Take the parameter out of weight decay."""
    parameter.not_decayed = True  # type: ignore[attr-defined]


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Give `target` the marks of `source`: wrappers and device moves make new Parameter objects without them."""
    for mark in MARKS:
        if hasattr(source, mark):
            setattr(target, mark, getattr(source, mark))
