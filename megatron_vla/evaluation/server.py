"""Policy server: openpi's websocket protocol, so that the published openpi-client works unchanged.

The server sends its metadata when a client connects; every binary message is an observation and is answered by
{"actions": float32 [horizon, action_dim], "server_timing": {...}}; an error is answered by a text message, which the client
raises. Requests of all clients that wait at the same moment are one batch. GET /healthz and /metrics answer on the same port.

A message never reaches the model before it was checked, and nothing that a client sends ends the server.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_vla.evaluation.policy import Policy, check_finite
from megatron_vla.evaluation.wire import WireError, observation_of, pack, unpack
from megatron_vla.version import __version__

LOG = logging.getLogger(__name__)
RECENT = 1024  # requests that the latency quantiles of /metrics look at
MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Server: where it listens and what it accepts"""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines in: set --token then, the connection itself is not encrypted."""

    port: int = 8000
    """Port; 0 picks a free one and prints it."""

    token: str | None = None
    """Clients must send it (openpi-client: api_key). Not set: anybody who reaches the port may ask."""

    max_message_mib: int = 16
    """Largest message accepted, in MiB; a larger one ends its connection."""

    max_batch_size: int = 32
    """Requests answered by one call of the model."""

    max_wait_ms: float = 2.0
    """How long the first request of a batch waits for others."""

    max_connections: int = 256
    """Clients at a time; further ones are refused."""

    observation_map: tuple[str, ...] = ()
    """DATASET_FEATURE=CLIENT_KEY where clients use other names, for example observation.images.top=observation/image."""

    state_key: str = "observation.state"
    """Name of the state in requests, unless --observation-map renames it."""

    noise_seed: int = 0
    """Seed of the noise that actions are sampled from."""

    warm_up: tuple[str, ...] = ()
    """With --eval-compile or --eval-cuda-graph: instructions that clients will send. Every batch size is computed with each of
    them before the port opens. None: the first request of every shape waits until it is compiled or captured."""


def parse_observation_map(entries: tuple[str, ...]) -> dict[str, str]:
    """("a=b",) -> {"a": "b"}. Raises ValueError naming the entry that is no pair."""
    pairs = [entry.partition("=") for entry in entries]
    wrong = [entry for entry, (left, sign, right) in zip(entries, pairs, strict=True) if not (left and sign and right)]
    if wrong:
        raise ValueError(f"--observation-map {wrong[0]!r}: write DATASET_FEATURE=CLIENT_KEY")
    return {left: right for left, _, right in pairs}


def check_server(config: ServerConfig, cameras: tuple[str, ...]) -> None:
    """Raise ValueError for a flag that would leave every client without an answer."""
    for flag, value, least in (
        ("--max-message-mib", config.max_message_mib, 1),
        ("--max-batch-size", config.max_batch_size, 1),
        ("--max-connections", config.max_connections, 1),
        ("--max-wait-ms", config.max_wait_ms, 0),
        ("--noise-seed", config.noise_seed, 0),
    ):
        if value < least:
            raise ValueError(f"{flag} {value:g}: too small -> use {least} or more")
    if not 0 <= config.port <= 65535:
        raise ValueError(f"--port {config.port}: ports are 1 to 65535 -> 0 picks a free one")
    known = (*cameras, config.state_key)
    for name in parse_observation_map(config.observation_map):
        if name not in known:
            raise ValueError(f"--observation-map {name}=...: the checkpoint has no such feature -> one of {', '.join(known)}")


@dataclass
class _Request:
    arrays: dict[str, Any]
    state_D: np.ndarray
    number: int
    arrived: float
    answer: asyncio.Future[tuple[np.ndarray, dict[str, float]]]


@dataclass
class ServerCounts:
    """What /metrics tells."""

    started: float = field(default_factory=time.monotonic)
    connections: int = 0
    connections_total: int = 0
    requests: int = 0
    errors: int = 0
    batches: int = 0
    refused: int = 0
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def text(self, actions_per_request: int) -> str:
        """Prometheus' text format."""
        quantiles = np.quantile(self.recent_ms, (0.5, 0.99)) if self.recent_ms else (0.0, 0.0)
        seconds = time.monotonic() - self.started
        values = {
            "uptime_seconds": seconds,
            "connections": self.connections,
            "connections_total": self.connections_total,
            "connections_refused_total": self.refused,
            "requests_total": self.requests,
            "errors_total": self.errors,
            "batches_total": self.batches,
            "mean_batch_size": self.requests / max(1, self.batches),
            "latency_ms_p50": float(quantiles[0]),
            "latency_ms_p99": float(quantiles[1]),
            "actions_total": self.requests * actions_per_request,
        }
        return "".join(f"megatron_vla_policy_{name} {value:g}\n" for name, value in values.items())


def print_line(line: str) -> None:
    """At once, also into a file: the next one may be a minute away."""
    print(line, flush=True)


class PolicyServer:
    """Serves one policy. `run()` until cancelled; `address` is known once `ready` is set."""

    def __init__(
        self,
        policy: Policy,
        config: ServerConfig,
        metadata: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = print_line,
    ) -> None:
        """metadata: more of it for clients. report: gets the lines of the warm-up."""
        self.policy, self.config, self.report = policy, config, report
        self.names = parse_observation_map(config.observation_map)
        check_server(config, policy.camera_keys)
        self.counts = ServerCounts()
        self.ready = asyncio.Event()
        self.address: tuple[str, int] = (config.host, config.port)
        self.metadata = {**describe(policy, config), **(metadata or {})}
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        # One thread: the model is called by one batch at a time while the loop goes on reading messages.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def run(self) -> None:
        """Warm up, then listen until cancelled.

        Raises ValueError when the packages are missing or --warm-up does not fit, OSError when the port is taken.
        """
        try:
            from websockets.asyncio.server import serve
        except ImportError as failure:
            raise ValueError("the server needs websockets and msgpack -> pip install -e '.[serve]'") from failure

        config = self.config
        # In the thread that will answer: graphs and torch's compiler belong to it.
        await asyncio.get_running_loop().run_in_executor(self._thread, self._warm_up)
        batches = asyncio.create_task(self._answer_batches())
        try:
            async with serve(
                self._client,
                config.host,
                config.port,
                process_request=self._before_upgrade,
                max_size=config.max_message_mib * MEBIBYTE,
                # Pictures do not get smaller, and a small message could unfold into a huge one.
                compression=None,
                max_queue=2,
            ) as server:
                self.address = next(iter(server.sockets)).getsockname()[:2]
                self.ready.set()
                # Ends only by an exception: without it nobody would be answered any more.
                await batches
        finally:
            batches.cancel()
            self._thread.shutdown(wait=False)

    def _warm_up(self) -> None:
        try:
            self.policy.warm_up(self.config.warm_up, self.report)
        except ValueError as problem:
            raise ValueError(f"--warm-up: {problem}") from problem

    def _before_upgrade(self, connection: Any, request: Any) -> Any:
        """Plain HTTP answers, and refusals; None goes on to the websocket."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        token = self.config.token
        if token is not None:
            sent = request.headers.get("Authorization", "")
            accepted = (f"Api-Key {token}", f"Bearer {token}")
            if not any(hmac.compare_digest(sent.encode(), wanted.encode()) for wanted in accepted):
                self.counts.refused += 1
                return connection.respond(
                    http.HTTPStatus.UNAUTHORIZED, "a valid token is needed (Authorization: Api-Key TOKEN)\n"
                )
        if path == "/metrics":
            return connection.respond(http.HTTPStatus.OK, self.counts.text(self.policy.action_horizon))
        if self.counts.connections >= self.config.max_connections:
            self.counts.refused += 1
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        return None

    async def _client(self, connection: Any) -> None:
        """One connection: messages in turn, each answered before the next is read."""
        from websockets.exceptions import ConnectionClosed

        self.counts.connections += 1
        self.counts.connections_total += 1
        try:
            await connection.send(pack(self.metadata))
            async for message in connection:
                await connection.send(await self._answer(message))
        except ConnectionClosed:
            pass  # too large a message, or a client that went away
        finally:
            self.counts.connections -= 1

    async def _answer(self, message: str | bytes) -> bytes | str:
        """The reply: actions, or the text of an error."""
        arrived = time.perf_counter()
        try:
            if isinstance(message, str):
                raise WireError("binary msgpack messages are expected, not text")
            unpacked = unpack(message)
            observation = observation_of(unpacked, self.policy.camera_keys, self.config.state_key, self.names)
            # Everything that the data can do wrong shows here and spoils nobody else's batch.
            arrays = self.policy.preprocess(observation)
            self.counts.requests += 1
            answer = asyncio.get_running_loop().create_future()
            request = _Request(arrays, observation.state_D, self.counts.requests, arrived, answer)
            await self._queue.put(request)
            actions_TD, timing = await request.answer
        except ValueError as problem:  # WireError and what preprocessing found
            self.counts.errors += 1
            return f"error: {problem}"
        except Exception as problem:  # the model's own failure: logged in full here, named to the client
            self.counts.errors += 1
            LOG.exception("request failed")
            return f"error: the policy failed ({type(problem).__name__}: {problem})"
        self.counts.recent_ms.append((time.perf_counter() - arrived) * 1e3)
        return pack({"actions": actions_TD, "server_timing": timing})

    async def _answer_batches(self) -> None:
        """Take what waits, call the model once, give everybody their own answer."""
        loop = asyncio.get_running_loop()
        while True:
            requests = [await self._queue.get()]
            deadline = loop.time() + self.config.max_wait_ms / 1e3
            while len(requests) < self.config.max_batch_size:
                if not self._queue.empty():
                    requests.append(self._queue.get_nowait())
                    continue
                try:
                    requests.append(await asyncio.wait_for(self._queue.get(), max(0.0, deadline - loop.time())))
                except TimeoutError:
                    break
            started = time.perf_counter()
            try:
                chunks = await loop.run_in_executor(self._thread, self._infer, requests)
            except Exception as problem:
                for request in requests:
                    if not request.answer.done():
                        request.answer.set_exception(problem)
                continue
            self.counts.batches += 1
            infer_ms = (time.perf_counter() - started) * 1e3
            for request, actions_TD in zip(requests, chunks, strict=True):
                # A client that went away has cancelled its request.
                if request.answer.done():
                    continue
                try:
                    check_finite(actions_TD)
                except ValueError as problem:
                    LOG.error("request %d: %s", request.number, problem)
                    request.answer.set_exception(problem)
                    continue
                timing = {
                    "infer_ms": infer_ms,
                    "queue_ms": (started - request.arrived) * 1e3,
                    "batch_size": float(len(requests)),
                }
                request.answer.set_result((actions_TD, timing))

    def _infer(self, requests: list[_Request]) -> list[np.ndarray]:
        noise = [self.policy.noise(self.config.noise_seed, request.number, 0) for request in requests]
        return self.policy.infer_prepared([r.arrays for r in requests], [r.state_D for r in requests], noise)


def describe(policy: Policy, config: ServerConfig) -> dict[str, Any]:
    """The metadata that a client gets first: what to send and what comes back."""
    settings = policy.preprocessor.settings
    names = parse_observation_map(config.observation_map)
    return {
        "server": f"megatron_vla {__version__}",
        "model": policy.config.model.model_name,
        "action_horizon": settings.num_steps,
        "action_dim": settings.action_dim,
        "action_names": list(settings.action_names),
        "action_fps": settings.action_fps,
        "state_dim": settings.state_dim,
        "state_names": list(settings.state_names),
        "state_key": names.get(config.state_key, config.state_key),
        "cameras": [names.get(key, key) for key in policy.camera_keys],
        "frame_steps": list(settings.frame_steps),
        "state_steps": list(settings.state_steps),
        "image_size": settings.image_size,
        **settings.about_robot,
        "num_inference_steps": policy.num_steps,
    }
