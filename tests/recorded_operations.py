"""A stand-in for CUDA graphs on the CPU: operations are noted as they are dispatched, and replayed without any Python code.

It has the properties of a CUDA graph that matter for a runner. Capturing changes no tensor. A replay reads and writes the very
tensors of the capture, with the Python numbers of the capture baked in; hooks, counters and schedules do not run. Reading a
value on the host during a capture is an error, and so are operations whose output shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from megatron_vla.training.metrics import StepMetrics

aten = torch.ops.aten
NEEDS_VALUES = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten.is_nonzero.default, aten.repeat_interleave.Tensor, aten._unique2.default, aten.bincount.default),
}


class HostReadError(RuntimeError):
    """A captured step asked for a value of a tensor."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of nested arguments."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def storage_of(tensor: Tensor) -> int:
    """Identity of the memory that a tensor lies in."""
    return tensor.untyped_storage()._cdata


def written_arguments(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that an operation changes in place, by its schema."""
    for position, argument in enumerate(function._schema.arguments):
        value = arguments[position] if position < len(arguments) else options.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if function.namespace == "c10d" or writes:
            yield from tensors_in(value)


class NotingOperations(TorchDispatchMode):
    """Notes every operation; keeps the old contents of memory from before the capture that gets overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.own: set[int] = set()  # memory that this capture has allocated
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.alive: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in NEEDS_VALUES:
            raise HostReadError(f"{function} during a capture")
        for tensor in written_arguments(function, args, kwargs):
            place = storage_of(tensor)
            if place not in self.own and place not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[place] = (whole, whole.clone())
        known = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = function(*args, **kwargs)
        if function.namespace == "c10d":
            result = _completed(result)
        fresh = [tensor for tensor in tensors_in(result) if storage_of(tensor) not in known]
        self.own |= {storage_of(tensor) for tensor in fresh}
        # Aliases that autograd cannot touch: its metadata must not keep the graph alive or refuse the copies of a replay.
        kept = [tensor.detach() for tensor in fresh]
        self.alive += kept
        changes = list(written_arguments(function, args, kwargs))
        if fresh or changes:
            self.operations.append((function, *_detached(args, kwargs), kept))
        return result

    def restore(self) -> None:
        """Undo what the capture has executed."""
        for whole, contents in self.before.values():
            whole.copy_(contents)


def _completed(result: Any) -> Any:
    """The result of a collective, when it is there: some backends write it in `wait`, and a replay would not call that."""
    leaves, structure = tree_flatten(result)
    done = [leaf if isinstance(leaf, Tensor) or leaf is None else Work.boxed(FakeWork()) for leaf in leaves]
    for leaf, replaced in zip(leaves, done, strict=True):
        if leaf is not replaced:
            Work.unbox(leaf).wait()
    return tree_unflatten(done, structure)


def _detached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def convert(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return tree_map(convert, (args, kwargs))


class OperationRecording:
    """One recorded step."""

    def __init__(self, mode: NotingOperations, result: StepMetrics):
        self._operations = mode.operations
        self._alive = mode.alive
        self.result = result
        self.replays = 0

    @torch.no_grad()
    def replay(self) -> None:
        """Every operation again, on the same memory."""
        assert self._operations, "released"
        self.replays += 1
        for function, args, kwargs, outputs in self._operations:
            result = function(*args, **kwargs)
            if function.namespace == "c10d":
                _completed(result)
            known = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
            fresh = [tensor for tensor in tensors_in(result) if storage_of(tensor) not in known]
            for kept, new in zip(outputs, fresh, strict=True):
                kept.copy_(new)

    def release(self) -> None:
        """Forget everything."""
        self._operations = []
        self._alive = []


class OperationRecorder:
    """Recorder of such recordings. `leaves_behind`: bytes that the next eager work in the pool will pretend to have left."""

    def __init__(self) -> None:
        self.recordings: list[OperationRecording] = []
        self.is_temporary = False
        self.leaves_behind = 0
        self._kept = 0

    def make_room(self) -> None:
        """Nothing is cached."""

    def record(self, work: Callable[[], StepMetrics]) -> OperationRecording:
        """Run `work`, then put all memory back."""
        mode = NotingOperations()
        with mode:
            result = work()
        mode.restore()
        for tensor in (result.loss, result.num_valid, result.gradient_norm, *result.extra.values()):
            tensor.fill_(-1)  # whoever reads them before a replay will see
        self.recordings.append(OperationRecording(mode, result))
        return self.recordings[-1]

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Notes that the region was used."""

        @contextmanager
        def region() -> Iterator[None]:
            self.is_temporary = True
            yield
            self.is_temporary = False
            self._kept += self.leaves_behind
            self.leaves_behind = 0

        return region()

    def kept_bytes(self) -> int:
        """What was left behind so far."""
        return self._kept

    def pool_bytes(self) -> int:
        """Nothing to tell."""
        return 0

    def release(self) -> None:
        """Nothing to free."""
