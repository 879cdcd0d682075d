"""Train a Vision-Language-Action model: parse -> check -> data -> initialize -> build -> load -> optimize -> wrap -> train."""

from __future__ import annotations

import sys

from megatron_vla.config.run import parse_args
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training.logging import print_once
from megatron_vla.training.loop import train
from megatron_vla.training.memory_report import report_memory
from megatron_vla.training.session import training_session


def main() -> None:
    """Command line entry. What a check found is printed alone, without a traceback, and ends with status 2."""
    config = parse_args()
    family = model_family(config.model.model_name)
    try:
        if config.optimization.report_memory:
            report_memory(config, family)
            return
        with training_session(config, family) as run:
            evaluations = train(run)
        for line in evaluations.finish() if evaluations is not None else ():
            print_once(line)
    except CheckError as exception:
        print_once(exception)
        sys.exit(2)


if __name__ == "__main__":
    main()
