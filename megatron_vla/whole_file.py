"""Text files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `path` in UTF-8; until that is done, what was there stays."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
