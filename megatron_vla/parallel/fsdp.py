"""FSDP2 (torch.distributed.fsdp.fully_shard): parameters, gradients and optimizer state are cut, layers gathered one by one.

Sharded parameters keep the model's dtypes and the optimizer keeps fp32 main parameters of the local shards, as with the other
strategies: whatever asks a parameter for its dtype gets the same answer, and so do checkpoints. (A mixed-precision policy with
fp32 shards would save 2 bytes per sharded parameter and answer fp32 for bf16 layers.) Gradients of bf16 layers are accumulated
and reduced in fp32, then rounded to bf16 once, because torch keeps `grad` in the parameter's dtype.

With several nodes the shards are replicated once per node (HSDP): gathers then stay inside a node, only gradients cross.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.optimizations.patterns import select_layers
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.owned_part import OwnedPart, gradient_of
from megatron_vla.parallel.parameter_shard import copy_marks
from megatron_vla.parallel.partial_gradients import PartialSums, norm_scope


def replicate_size(parallel: ParallelConfig, world_size: int) -> int:
    """Copies of the sharded model: --fsdp-replicate-size, or one per node that the data-parallel ranks fill evenly.

    Raises ValueError when the copies do not divide the data-parallel ranks.
    """
    size = world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    if parallel.fsdp_replicate_size is not None:
        if size % parallel.fsdp_replicate_size:
            raise ValueError(
                f"--fsdp-replicate-size {parallel.fsdp_replicate_size} does not divide the {size} data-parallel ranks; "
                "use --fsdp-replicate-size 1, or leave it out"
            )
        return parallel.fsdp_replicate_size
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ranks_per_node = max(1, local_world_size // parallel.tensor_model_parallel_size)
    return size // ranks_per_node if size % ranks_per_node == 0 and size > ranks_per_node else 1


def _mesh(groups: ParallelGroups, replicas: int) -> DeviceMesh:
    """Mesh of this rank's data-parallel peers: one dimension, or (replicate, shard). All ranks of the run call it."""
    if replicas == 1:
        return DeviceMesh.from_group(groups.data_parallel_group, groups.device.type, mesh_dim_names=("shard",))
    tensor, pipeline = groups.tensor_model_parallel_size, groups.pipeline_model_parallel_size
    shards = groups.data_parallel_size // replicas
    # megatron-core's rank order: tensor-parallel ranks are neighbours, pipeline stages farthest apart.
    shape, names = (pipeline, replicas, shards, tensor), ("pipeline", "replicate", "shard", "tensor")
    mesh = init_device_mesh(groups.device.type, shape, mesh_dim_names=names)["replicate", "shard"]
    place = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
    assert place == groups.data_parallel_rank, (place, groups.data_parallel_rank)
    return mesh


def _trained_dtypes(module: nn.Module, skipped: Set[int] = frozenset(), recurse: bool = True) -> set[torch.dtype]:
    """Dtypes of trained parameters: torch wants one per unit, because a unit reduces its gradients together.

    Frozen ones are gathered as bytes with the others, whatever their dtype.
    """
    parameters = module.parameters(recurse)
    return {p.dtype for p in parameters if p.requires_grad and id(p) not in skipped}


def _units(module: nn.Module, other: torch.dtype) -> Iterator[nn.Module]:
    """Largest submodules all of whose trained parameters have dtype `other`."""
    dtypes = _trained_dtypes(module)
    if dtypes == {other}:
        yield module
    elif other in dtypes:
        mixed = _trained_dtypes(module, recurse=False)
        if len(mixed) > 1:
            raise ValueError(f"{type(module).__name__} owns parameters of {mixed}: fsdp2 needs one dtype per module")
        if mixed == {other}:
            raise ValueError(f"{type(module).__name__} owns {other} parameters beside submodules of another dtype")
        for child in module.children():
            yield from _units(child, other)


def _main_dtype(module: nn.Module, skipped: set[int]) -> torch.dtype:
    """Dtype of most elements of the trained parameters (of all, where none is) that no unit below has taken."""
    counts: dict[tuple[bool, torch.dtype], int] = {}
    for parameter in module.parameters():
        if id(parameter) not in skipped:
            key = parameter.requires_grad, parameter.dtype
            counts[key] = counts.get(key, 0) + parameter.numel()
    return max(counts, key=lambda key: (key[0], counts[key]))[1]


class FullyShardedModel:
    """A model under fully_shard: one unit per layer, one for the rest, and one more in each where dtypes mix."""

    def __init__(self, module: nn.Module, parallel: ParallelConfig, groups: ParallelGroups, block_names: Sequence[str]):
        replicas = replicate_size(parallel, groups.world_size)
        self.mesh = _mesh(groups, replicas)
        reduce_dtype = torch.float32 if parallel.accumulate_allreduce_grads_in_fp32 else None
        self._low_precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        self._full_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        self._reshard = parallel.fsdp_reshard_after_forward
        originals = dict(module.named_parameters())
        shapes = {name: tuple(p.shape) for name, p in originals.items()}
        for block in select_layers(module, block_names).values():
            self._shard(block)
        self._shard(module)
        self.module = module
        self.forward_module: nn.Module = module
        self._shapes: Mapping[int, tuple[int, ...]] = {}
        shapes_of_new = {}
        for name, parameter in module.named_parameters():
            copy_marks(originals[name], parameter)
            shapes_of_new[id(parameter)] = shapes[name]
        self._shapes = shapes_of_new
        self._fsdp_modules = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for unit in self._fsdp_modules:
            # The loss is a sum over ranks. Plain sums, no pre-multiplied ones: gloo has only these.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        named = [(n, part) for n, p in module.named_parameters() if p.requires_grad and (part := self.owned_part(p))]
        self._partial = PartialSums(named, groups)
        replica = self.mesh.get_local_rank("replicate") if replicas > 1 else 0
        self.norm_scope = norm_scope(groups, sharded=True, replica=replica, skipped=self._partial.counted_elsewhere)

    def _shard(self, module: nn.Module) -> None:
        """Make `module` a unit, after one for its trained parameters of each other dtype."""
        taken = {id(p) for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
        main = _main_dtype(module, taken)
        for dtype in _trained_dtypes(module, taken) - {main}:
            units = [u for u in _units(module, dtype) if not any(id(p) in taken for p in u.parameters())]
            self._fully_shard(units, dtype)
        self._fully_shard(module, main)

    def _fully_shard(self, target: nn.Module | list[nn.Module], dtype: torch.dtype) -> None:
        low = dtype not in (torch.float32, torch.float64)
        policy = self._low_precision if low else self._full_precision
        fully_shard(cast(Any, target), mesh=self.mesh, reshard_after_forward=self._reshard, mp_policy=policy)

    def owned_part(self, parameter: nn.Parameter) -> OwnedPart | None:
        """The rows of dimension 0 that this rank holds: a contiguous range of the flattened parameter."""
        data = parameter.detach()
        assert isinstance(data, DTensor), f"parameter of shape {tuple(parameter.shape)} was not sharded"
        local = data.to_local()
        shape = self._shapes[id(parameter)]
        if not local.numel():
            return None
        # torch cuts dimension 0 like torch.chunk: equal pieces of ceil(rows / ranks), the last ones shorter or empty.
        shards = self.mesh.size(self.mesh.ndim - 1)
        rows_per_rank = -(-shape[0] // shards)
        start = rows_per_rank * self.mesh.get_local_rank(self.mesh.ndim - 1) * (local.numel() // local.shape[0])

        def read_gradient() -> Tensor:
            return cast(DTensor, gradient_of(parameter)).to_local()

        return OwnedPart(parameter, local, (start, start + local.numel()), shape, read_gradient)

    def zero_gradients(self) -> None:
        """Drop the gradients; the first reduction sets them anew."""
        self.module.zero_grad(set_to_none=True)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Only the last micro-batch reduces; the others accumulate whole gradients."""
        return nullcontext() if is_last else self._without_reduction()

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        root = cast(FSDPModule, self.module)
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)

    def finish_gradients(self) -> None:
        """FSDP has waited for its reductions by the end of backward."""
        self._partial.complete()

    def mask_gradients(self, keep: Tensor) -> None:
        """One kernel per local shard."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                cast(DTensor, parameter.grad).to_local().masked_fill_(~keep, 0.0)

    def publish_parameters(self) -> None:
        """Nothing to do: every forward pass gathers the shards."""

    def gather_parameters(self) -> None:
        """Nothing to do: parameters outside forward are the shards themselves."""

    def after_replay(self) -> None:
        """Never called: a graph runner refuses fsdp2."""
