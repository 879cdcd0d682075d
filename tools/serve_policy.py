"""Serves a checkpoint over openpi's websocket protocol.

    python tools/serve_policy.py --checkpoint outputs/quickstart/checkpoints --port 8000

Clients: `openpi_client.websocket_client_policy.WebsocketClientPolicy(host, port)`, unchanged. What to send is in the metadata
that a client receives first. GET /healthz answers "OK", GET /metrics gives counts and latencies in Prometheus' format.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.evaluation_check import rollout_findings
from megatron_vla.evaluation.policy import PolicySettings, load_policy, open_checkpoint
from megatron_vla.evaluation.server import PolicyServer, ServerConfig
from megatron_vla.findings import CheckError, raise_errors


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """Checkpoint: what is served"""

    checkpoint: str = ""
    """A checkpoint folder (iter_0001000), or a --save folder, whose latest one is taken (required)."""


def parse(arguments: Sequence[str]) -> tuple[ServedConfig, ServerConfig, EvaluationConfig]:
    """Flags -> sections. Of the evaluation flags those of the policy matter (--eval-device, --eval-compile, ...)."""
    parser = StrictParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for section in (ServedConfig, ServerConfig, EvaluationConfig):
        add_section(parser, section)
    given = parser.parse_flags(arguments)
    sections = [build_section(section, given) for section in (ServedConfig, ServerConfig, EvaluationConfig)]
    return sections[0], sections[1], sections[2]


async def serve(server: PolicyServer) -> None:
    """Run, and say where as soon as the port is open."""
    running = asyncio.create_task(server.run())
    waiting = asyncio.create_task(server.ready.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    if server.ready.is_set():
        host, port = server.address
        print(f"serving on ws://{host}:{port} (health: http://{host}:{port}/healthz, metrics: /metrics)", flush=True)
    await running


def main(arguments: Sequence[str]) -> None:
    """Load, then serve until interrupted."""
    served, config, evaluation = parse(arguments)
    raise_errors(rollout_findings(evaluation))
    if not served.checkpoint:
        raise ValueError("--checkpoint is not set -> name a checkpoint folder or a --save folder")
    settings = replace(PolicySettings.from_config(evaluation), max_batch_size=max(1, config.max_batch_size))
    policy = load_policy(open_checkpoint(Path(served.checkpoint)), settings)
    if config.host not in ("127.0.0.1", "localhost", "::1") and config.token is None:
        print(f"warning: --host {config.host} without --token: anybody who reaches the port may use the policy", flush=True)
    try:
        asyncio.run(serve(PolicyServer(policy, config)))
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, CheckError, OSError) as failure:
        raise SystemExit(f"error: {failure}") from None
