"""`python -m megatron_vla.evaluation`: the evaluation command of an installed package (see command.py)."""

from __future__ import annotations

import sys

from megatron_vla.evaluation.command import main
from megatron_vla.findings import CheckError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, CheckError) as failure:
        raise SystemExit(f"error: {failure}") from None
