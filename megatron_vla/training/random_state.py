"""Random generator states of one rank as tensors, for checkpoints.

Nothing in a training step draws from these generators (order, noise, flow time and augmentation are pure functions), so they
only matter to code that a user adds; a resume on another number of ranks therefore may lack some without harm.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture(rank: int) -> dict[str, Tensor]:
    """States of Python's, NumPy's and torch's global generators, keyed `rank0.torch` and so on."""
    version, words, gauss = random.getstate()
    assert version == 3 and gauss is None, "random.gauss is not used in this project"
    numpy_state: Any = np.random.get_state(legacy=True)
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor(np.asarray(numpy_state[1], dtype=np.int64)),
        "numpy_position": torch.tensor([int(numpy_state[2])], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rank{rank}.{name}": state for name, state in states.items()}


def restore(states: Mapping[str, Tensor], rank: int) -> bool:
    """Set the generators from `capture`'s output; False when the checkpoint has no states of this rank."""
    own = {name.split(".", 1)[1]: state for name, state in states.items() if name.startswith(f"rank{rank}.")}
    if not own:
        return False
    random.setstate((3, tuple(own["python"].tolist()), None))
    words = own["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(own["numpy_position"].item()), 0, 0.0))
    torch.set_rng_state(own["torch"])
    if torch.cuda.is_available() and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
    return True
