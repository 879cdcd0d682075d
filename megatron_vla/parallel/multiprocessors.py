"""Share a GPU's multiprocessors between matrix products and the reductions that run beside them in backward.

A matrix product starts one block on every multiprocessor (132 on an H200) and is over when the last block is. NCCL's blocks, up
to 32, hold theirs as long as a reduction lasts, so that the product's last blocks start when its first ones end: on two H200
and with Pi0.5's 6.5 GB of bf16 gradients, 53 ms of reductions made the products of a step 21 ms longer. With
few blocks a reduction lasts longer, which backward hides, and products that leave them free never wait.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_vla.config.parallel import ParallelConfig

# megatron-core's names of the groups that gradients are reduced in.
REDUCING_GROUPS = ("dp", "dp_cp", "intra_dp_cp")


@contextmanager
def communicator_config(parallel: ParallelConfig) -> Iterator[str | None]:
    """Path of the file that tells megatron-core how many blocks data-parallel communicators may use; None without a limit
    or a GPU."""
    limit = parallel.data_parallel_sms
    if limit is None or not torch.cuda.is_available():
        yield None
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.writelines(f"{group}: {{min_ctas: 1, max_ctas: {limit}}}\n" for group in REDUCING_GROUPS)
        file.flush()
        yield file.name


def leave_free(parallel: ParallelConfig, data_parallel_size: int) -> None:
    """Let this process's matrix products use all multiprocessors but those of --data-parallel-sms. No effect without a GPU.

    Only cuBLASLt can be told, so products that torch would give to cuBLAS go there, too.
    """
    if parallel.data_parallel_sms is not None and data_parallel_size > 1 and torch.cuda.is_available():
        torch._C._set_sm_carveout_experimental(parallel.data_parallel_sms)
        torch.backends.cuda.preferred_blas_library("cublaslt")


def use_all_again() -> None:
    """Undo `leave_free`."""
    if torch._C._get_sm_carveout_experimental() is not None:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library("default")
