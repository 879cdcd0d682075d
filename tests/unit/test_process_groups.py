"""Which groups get a communicator, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_vla.parallel.groups import _communicators_on_first_use


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A world of one that says it is bound to a GPU, as NCCL's is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = torch.device("cuda", 0)
    yield group
    group.bound_device_id = None
    dist.destroy_process_group()


def test_new_groups_are_not_bound_and_the_world_is_again(world: dist.ProcessGroup) -> None:
    """torch.distributed connects new groups at once where the world is bound to a device."""
    with _communicators_on_first_use():
        assert world.bound_device_id is None
        assert dist.new_group([0]).bound_device_id is None
    assert world.bound_device_id == torch.device("cuda", 0)
    with pytest.raises(KeyError), _communicators_on_first_use():
        raise KeyError
    assert world.bound_device_id == torch.device("cuda", 0)
