"""The policy server against the published openpi-client: right answers, own answers, and no message that ends it."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_fixtures import opened_up, random_observation, train_checkpoint

from megatron_vla.evaluation.environments.interface import Observation
from megatron_vla.evaluation.policy import Policy, PolicySettings, load_policy, open_checkpoint
from megatron_vla.evaluation.server import PolicyServer, ServerConfig
from megatron_vla.evaluation.wire import WireError, pack, unpack

websockets_client = pytest.importorskip("websockets.sync.client")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    save = train_checkpoint(tmp_path_factory.mktemp("served"))
    return opened_up(load_policy(open_checkpoint(save), PolicySettings(device="cpu", num_inference_steps=2)))


@contextmanager
def serving(policy: Policy, **flags: Any) -> Iterator[PolicyServer]:
    """A server in a thread of its own, stopped at the end."""
    server = PolicyServer(policy, ServerConfig(port=0, **flags))
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def main() -> None:
        running = asyncio.create_task(server.run())
        await server.ready.wait()
        started.set()
        await stop.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(20)
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
    assert not thread.is_alive()


def message(observation: Observation) -> dict[str, Any]:
    """A request as clients send it."""
    return {**observation.images, "observation.state": observation.state_D, "prompt": observation.instruction}


def expected(policy: Policy, observation: Observation, number: int) -> np.ndarray:
    """What the policy answers when asked alone."""
    return policy.infer([observation], [policy.noise(0, number, 0)])[0]


def client_of(server: PolicyServer, **options: Any) -> Any:
    module = pytest.importorskip("openpi_client.websocket_client_policy", reason="pip install --no-deps openpi-client")
    return module.WebsocketClientPolicy(*server.address, **options)


def get(server: PolicyServer, path: str, **headers: str) -> tuple[int, str]:
    host, port = server.address
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as failure:
        return failure.code, failure.read().decode()


def test_openpi_client_drives_the_server_for_20_steps(policy: Policy) -> None:
    with serving(policy, observation_map=("observation.images.top=observation/image", "observation.state=state")) as server:
        client = client_of(server)
        metadata = client.get_server_metadata()
        assert metadata["action_horizon"] == 6 and metadata["action_dim"] == 4
        assert metadata["cameras"] == ["observation/image", "observation.images.wrist"] and metadata["state_key"] == "state"
        for step in range(1, 21):
            observation = random_observation(step)
            top, wrist = observation.images.values()
            sent = {
                "observation/image": top,
                "observation/images/wrist": wrist,
                "state": observation.state_D,
                "prompt": observation.instruction,
            }
            answer = client.infer(sent)
            np.testing.assert_allclose(answer["actions"], expected(policy, observation, step), rtol=1e-5, atol=1e-5)
            assert answer["actions"].dtype == np.float32 and answer["server_timing"]["infer_ms"] > 0
        with pytest.raises(RuntimeError, match=r"observation\.images\.wrist is missing; the request has prompt"):
            client.infer({"prompt": "x", "observation/image": top})
        assert client.infer(sent)["actions"].shape == (6, 4)
        assert "megatron_vla_policy_requests_total 21\n" in get(server, "/metrics")[1]


def test_32_concurrent_clients_get_their_own_answers(policy: Policy) -> None:
    """Noise depends on the request's number, so it is fixed here: an answer then belongs to one observation only."""
    observations = [random_observation(100 + k) for k in range(32)]
    fixed = policy.noise(0, 0, 0)
    wanted = policy.infer(observations, [fixed] * 32)
    barrier = threading.Barrier(32)

    def ask(number: int) -> list[np.ndarray]:
        client = client_of(server)
        barrier.wait(120)
        return [client.infer(message(observations[number]))["actions"] for _ in range(3)]

    with serving(policy, max_wait_ms=20.0) as server, ThreadPoolExecutor(32) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "noise", lambda *_: fixed)
            answers = list(pool.map(ask, range(32)))
        for number, mine in enumerate(answers):
            for actions_TD in mine:
                np.testing.assert_allclose(actions_TD, wanted[number], rtol=1e-4, atol=1e-4)
        assert server.counts.requests == 96 and server.counts.batches < 60, "requests were not batched"
    distances = [np.abs(wanted[0] - other).max() for other in wanted[1:]]
    assert min(distances) > 1e-3, "answers that are alike prove nothing"


def broken_messages(good: bytes, count: int) -> Iterator[bytes | str]:
    """Cut, flipped, random, nested and well-formed but wrong messages."""
    generator = random.Random(5)
    picture = np.zeros((4, 4, 3), np.uint8)
    fine = {"prompt": "x", "observation.images.top": picture, "observation.images.wrist": picture, "observation.state": [0] * 4}
    wrong: list[Any] = [
        None,
        [],
        {},
        7,
        {"prompt": 3},
        {**fine, "observation.images.wrist": "no"},
        {**fine, "observation.state": [1, 2]},
        {**fine, "observation.state": [np.nan] * 4},
        {"prompt": "x" * 5000, "observation.images.top": picture},
        {b"__ndarray__": True, b"data": b"123", b"dtype": "<f4", b"shape": [1]},
        {b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [0]},
        {b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [1 << 40, 1 << 40, 0]},
        {b"__ndarray__": True, b"data": b"", b"dtype": "{", b"shape": [-1]},
        {b"__npgeneric__": True, b"data": "x", b"dtype": "<i1"},
    ]
    for number in range(count):
        kind = number % 5
        if kind == 0:
            yield good[: generator.randrange(len(good))]
        elif kind == 1:
            flipped = bytearray(good)
            for _ in range(generator.randrange(1, 20)):
                # The head holds the keys and lengths; most of the rest is pixels, where anything is valid.
                flipped[generator.randrange(120)] = generator.randrange(256)
            yield bytes(flipped)
        elif kind == 2:
            yield generator.randbytes(generator.randrange(200))
        elif kind == 3:
            yield pack(wrong[number // 5 % len(wrong)])
        else:
            yield b"\x91" * generator.randrange(2000) + b"\x01" if number % 2 else "text " + "é" * number


def test_1000_malformed_messages_are_answered_and_the_server_lives_on(policy: Policy) -> None:
    observation = random_observation(9)
    good = pack(message(observation))
    errors = 0
    with serving(policy) as server:
        with websockets_client.connect("ws://{}:{}".format(*server.address), compression=None, max_size=None) as connection:
            unpack(connection.recv())
            for sent in broken_messages(good, 1000):
                connection.send(sent)
                answer = connection.recv(timeout=120)
                errors += isinstance(answer, str)
                assert isinstance(answer, bytes) or (answer.startswith("error: ") and len(answer) < 2000)
        # A flipped bit may leave a valid request.
        assert errors > 750
        answer = client_of(server).infer(message(observation))
        assert answer["actions"].shape == (6, 4)
        assert get(server, "/healthz") == (200, "OK\n")


def test_size_token_and_number_of_clients_are_bounded(policy: Policy) -> None:
    from websockets.exceptions import ConnectionClosedError, InvalidStatus

    with serving(policy, token="secret", max_message_mib=1, max_connections=1) as server:
        address = "ws://{}:{}".format(*server.address)
        assert server.address[0] == "127.0.0.1"
        with pytest.raises(InvalidStatus, match="401"):
            websockets_client.connect(address)
        assert get(server, "/healthz")[0] == 200 and get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer secret")[0] == 200
        headers = {"Authorization": "Api-Key secret"}
        with websockets_client.connect(address, additional_headers=headers, compression=None) as connection:
            connection.recv()
            with pytest.raises(InvalidStatus, match="503"):
                websockets_client.connect(address, additional_headers=headers)
            connection.send(b"x" * (1 << 20))
            assert "error" in connection.recv(timeout=60)
            with pytest.raises(ConnectionClosedError, match="1009"):
                connection.send(b"x" * ((1 << 20) + 1))
                connection.recv(timeout=60)
        client = client_of(server, api_key="secret")
        assert client.infer(message(random_observation(1)))["actions"].shape == (6, 4)


def test_model_failure_is_answered(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(policy) as server:
        client = client_of(server)
        with monkeypatch.context() as patch:
            patch.setattr(policy, "infer_prepared", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
            with pytest.raises(RuntimeError, match=r"the policy failed .RuntimeError: out of memory"):
                client.infer(message(random_observation(1)))
        assert client.infer(message(random_observation(1)))["actions"].shape == (6, 4)


def test_actions_that_are_no_numbers_reach_no_robot(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names the problem, and the next request of the same client is answered."""
    real = policy._sampler._sample

    def damaged(batch: Any) -> Any:
        actions_BTA = real(batch)
        actions_BTA[0, 0, 0] = float("nan")
        return actions_BTA

    with serving(policy) as server:
        client = client_of(server)
        with monkeypatch.context() as patch:
            patch.setattr(policy._sampler, "_sample", damaged)
            with pytest.raises(RuntimeError, match=r"error: 24 of 24 predicted numbers are NaN or infinite: the checkpoint's"):
                client.infer(message(random_observation(1)))
        assert server.counts.errors == 1
        assert np.isfinite(client.infer(message(random_observation(1)))["actions"]).all()


def test_the_port_opens_after_the_warm_up(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that answers."""
    asked: list[tuple[tuple[str, ...], str]] = []
    monkeypatch.setattr(policy, "warm_up", lambda names, report: asked.append((names, threading.current_thread().name)))
    with serving(policy, warm_up=("Open a drawer",)) as server:
        assert asked == [(("Open a drawer",), "policy_0")] and get(server, "/healthz")[0] == 200
    monkeypatch.setattr(policy, "warm_up", lambda *_: (_ for _ in ()).throw(ValueError("prompt of 71 tokens")))
    with pytest.raises(ValueError, match="--warm-up: prompt of 71 tokens"):
        asyncio.run(PolicyServer(policy, ServerConfig(port=0)).run())


def test_our_wire_format_is_theirs() -> None:
    theirs = pytest.importorskip("openpi_client.msgpack_numpy")
    content = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": [np.float32(1.5), "x"], "c": np.zeros((0, 2))}
    for decoded in (theirs.unpackb(pack(content)), unpack(theirs.packb(content))):
        np.testing.assert_array_equal(decoded["a"], content["a"])
        assert decoded["b"] == [1.5, "x"] and decoded["a"].dtype == np.int16 and decoded["c"].shape == (0, 2)
    with pytest.raises(WireError, match="object"):
        pack({"x": np.array([object()])})


def test_bad_observation_map_is_named(policy: Policy) -> None:
    with pytest.raises(ValueError, match="--observation-map 'top'"):
        PolicyServer(policy, ServerConfig(observation_map=("top",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_message_mib": 0}, "--max-message-mib 0"),
        ({"max_batch_size": 0}, "--max-batch-size 0"),
        ({"max_wait_ms": -1.0}, "--max-wait-ms -1"),
        ({"port": 70000}, "--port 70000"),
        ({"observation_map": ("observation.image=a",)}, "--observation-map observation.image=...: the checkpoint has no such"),
    ],
)
def test_bad_server_flags_are_named(policy: Policy, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyServer(policy, ServerConfig(**change))


def test_checkpoint_of_mock_data_cannot_act(tmp_path: Path) -> None:
    from training_fixtures import build_run, config_saving_to

    from megatron_vla.config.parallel import ParallelConfig
    from megatron_vla.parallel.groups import initialize, shut_down
    from megatron_vla.training.checkpoint_saving import save_checkpoint

    groups = initialize(ParallelConfig(), quiet=True)
    run = build_run(config_saving_to(tmp_path), groups)
    save_checkpoint(run.state, run.config, groups, run.supply)
    shut_down()
    with pytest.raises(ValueError, match="mock data"):
        load_policy(open_checkpoint(tmp_path), PolicySettings(device="cpu"))
    # A checkpoint from before the evaluation section existed.
    config = json.loads((tmp_path / "iter_0000000/config.json").read_text())
    assert config.pop("evaluation")["eval_environment"] == "metaworld"
