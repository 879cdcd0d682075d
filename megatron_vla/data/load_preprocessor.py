"""The preprocessor of a checkpoint folder, whatever family it belongs to: what serving and evaluation load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_vla.data.groot.preprocess import KIND as GROOT
from megatron_vla.data.groot.preprocess import GrootPreprocessor
from megatron_vla.data.preprocess import Preprocessor, read_preprocessing

KINDS: dict[str, Any] = {GROOT: GrootPreprocessor}


def load_preprocessor(folder: Path) -> Any:
    """Raises ValueError naming the file that is missing, broken or of an unknown kind."""
    content, tokenizer_bytes, where = read_preprocessing(folder)
    kind = content.get("kind")
    if kind is None:
        return Preprocessor.from_dict(content, tokenizer_bytes, where)
    if kind not in KINDS:
        raise ValueError(f"{where}: preprocessing of kind {kind!r}; known are {', '.join(KINDS)}")
    return KINDS[kind].from_dict(content, tokenizer_bytes, where)
