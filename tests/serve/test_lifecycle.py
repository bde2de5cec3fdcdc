"""Guarantees 5, 6, 11, 19 and 21: starting, swapping, draining, leaving, and whose answer is whose."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import psutil
import pytest

from slim_scheduler.client.client import AsyncSlimClient, Constraints, RefusedError, SlimClient
from slim_scheduler.client.wire import request_head
from tests.serve.conftest import ROOT, Running, serving
from tests.serve.hanging_server import HANGS
from tests.serve.wire import Wire, call, infer, metrics

TOKEN = "0123456789abcdef"
# Ten images whose answers are told apart: the nonce of each request is which of them it sends.
SLOW = {"slowdown": 400.0, "router": "round-robin:1"}


def conserved(found: dict[str, float]) -> None:
    for unit in ("requests", "items"):
        received = found[f'slim_{unit}_received_total{{model="digits"}}']
        ended = sum(value for name, value in found.items() if name.startswith(f"slim_{unit}_total{{"))
        assert received == ended + found[f'slim_{unit}_in_flight{{model="digits"}}']


async def nonces(server: Running, requests: int, connections: int, scrapes: int) -> None:
    """Each answer must be the one of its own input: a projection that no other nonce has."""
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((requests if requests < 2000 else 2000, 1, 8, 8), dtype=np.float32)
    async with AsyncSlimClient(server.url) as client:
        wide = Constraints(width=1.0)
        expected = np.concatenate(
            [(await client.infer(inputs[i : i + 100], wide)).logits for i in range(0, len(inputs), 100)]
        )
        assert len({row.tobytes() for row in np.round(expected, 3)}) == len(inputs)
        before = metrics(server.http)
        waiting = iter(range(requests))
        answered = 0

        async def caller() -> None:
            nonlocal answered
            for number in waiting:
                nonce = number % len(inputs)
                logits = (await client.infer(inputs[nonce : nonce + 1], wide)).logits[0]
                assert np.allclose(logits, expected[nonce], atol=1e-3), f"request {number} got another's answer"
                answered += 1

        async def scraper() -> None:
            for _ in range(scrapes):
                conserved(await asyncio.to_thread(metrics, server.http))
                await asyncio.sleep(0.05)

        await asyncio.gather(scraper(), *(caller() for _ in range(connections)))
        after = metrics(server.http)
    assert answered == requests
    name = 'slim_requests_total{model="digits",outcome="answered"}'
    assert after[name] - before[name] == requests
    conserved(after)


async def test_every_answer_belongs_to_its_request_and_conservation_holds(server):
    await nonces(server, 3000, connections=64, scrapes=20)


@pytest.mark.accept
@pytest.mark.timeout(900)
async def test_every_answer_of_100_000_belongs_to_its_request(server):
    await nonces(server, 100_000, connections=64, scrapes=200)


def test_sigterm_says_not_ready_serves_on_finishes_what_is_in_flight_and_exits_0(tmp_path, images):
    with serving(tmp_path, "--drain-delay-s", "3", config=SLOW) as server:

        async def drain() -> None:
            async with AsyncSlimClient(server.url) as client:
                running = [asyncio.create_task(client.infer(images[:1])) for _ in range(8)]
                while metrics_of(server, "slim_requests_in_flight") < 8:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                while (await asyncio.to_thread(call, server.http, "GET", "/v2/health/ready"))[0] != 503:
                    await asyncio.sleep(0.01)
                assert (await asyncio.to_thread(call, server.http, "GET", "/v2/health/live"))[0] == 200
                running.append(asyncio.create_task(client.infer(images[:1])))  # who has not noticed is served
                for prediction in await asyncio.gather(*running):
                    assert prediction.logits.shape == (1, 10)

        asyncio.run(drain())
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_the_delay(tmp_path):
    with serving(tmp_path, "--drain-delay-s", "1000") as server:
        server.process.send_signal(signal.SIGTERM)
        while call(server.http, "GET", "/v2/health/ready")[0] != 503:
            time.sleep(0.01)
        assert server.stop() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_server_that_is_still_starting_ends_at_once(number, code):
    words = ("tests.serve.slow_start", "serve", "-c", "examples/demo/cluster.toml", "--port", "0", "--grpc-port", "-1")
    with subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            assert "starting\n" in process.stderr
            process.send_signal(number)
            assert process.wait(20) == code
        finally:
            process.kill()


def test_the_grace_time_is_a_limit(tmp_path, images):
    slower = {"slowdown": 20_000.0, "router": "round-robin:1"}
    with serving(tmp_path, "--grace-s", "0.5", config=slower) as server:

        async def cut_off() -> None:
            async with AsyncSlimClient(server.url) as client:
                running = [asyncio.create_task(client.infer(images[:1])) for _ in range(8)]
                while metrics_of(server, "slim_requests_in_flight") < 4:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                ended = await asyncio.gather(*running, return_exceptions=True)
                assert any(isinstance(end, RefusedError) and end.status == 503 for end in ended)

        asyncio.run(cut_off())
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("what", ["batch", "load"])
def test_what_hangs_does_not_keep_the_server_from_ending(tmp_path, images, what):
    options = ("--grace-s", "0.5", "--drain-delay-s", "0")
    with (
        serving(tmp_path, *options, module="tests.serve.hanging_server") as server,
        Wire(server.http if what == "batch" else server.management) as wire,
    ):
        load = request_head("POST", "/v2/repository/models/digits/load", wire.host, 0)
        wire.send(wire.request(images + HANGS) if what == "batch" else load)
        while "hanging\n" not in server.errors:
            time.sleep(0.01)
        assert server.stop() == 1, "within 30 s, a quarter of what it hangs"
        name = {"batch": "slim-[ab]-0", "load": "slim-load-digits"}[what]
        assert re.search(f"ending without {name}$", server.errors[-1])


def metrics_of(server: Running, name: str) -> float:
    return metrics(server.http)[f'{name}{{model="digits"}}']


async def test_a_client_that_leaves_frees_its_place(tmp_path, images):
    # A client that is gone looks like one that has only sent its end, until it was asked after two seconds: the work
    # must last longer than that on the fastest machine.
    slower = {"slowdown": 20_000.0, "router": "round-robin:1"}
    with serving(tmp_path, "--grace-s", "0.5", config=slower) as server:
        async with AsyncSlimClient(server.url) as client:
            running = [asyncio.create_task(client.infer(images[:1])) for _ in range(20)]
            while metrics_of(server, "slim_requests_in_flight") < 10:
                await asyncio.sleep(0.01)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            until = time.monotonic() + 20
            while metrics_of(server, "slim_requests_in_flight") and time.monotonic() < until:
                await asyncio.sleep(0.01)
        found = metrics(server.http)
        assert found['slim_requests_in_flight{model="digits"}'] == 0
        assert found['slim_requests_total{model="digits",outcome="cancelled"}'] >= 1
        conserved(found)


async def test_models_and_policies_are_swapped_under_load_without_an_error(tmp_path, images):
    models = tmp_path / "models"
    shutil.copytree(ROOT / "models/digits", models / "digits")
    (models / "broken").mkdir()
    (models / "broken/manifest.json").write_text("{}")
    with serving(tmp_path, config={"model": models / "digits"}) as server:
        stop = asyncio.Event()
        answered = 0

        async def caller(client: AsyncSlimClient) -> None:
            nonlocal answered
            while not stop.is_set():
                await client.infer(images[:1])  # raises for every error
                answered += 1

        def manage(path: str, body: object = None) -> int:
            return call(server.management, "POST", f"/v2/repository/models/{path}", body)[0]

        async with AsyncSlimClient(server.url) as client:
            callers = [asyncio.create_task(caller(client)) for _ in range(8)]
            assert await asyncio.to_thread(manage, "digits/policy", {"router": "jsq:0.25"}) == 200
            assert (await client.infer(images[:1])).widths == "0.25,0.25,0.25,0.25"
            assert await asyncio.to_thread(manage, "digits/load") == 200
            assert (await client.infer(images[:1])).widths == "0.25,0.25,0.25,0.25"
            weights = models / "digits/weights.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
            assert await asyncio.to_thread(manage, "digits/load") == 400
            assert await asyncio.to_thread(manage, "broken/load") == 400
            for wrong in ("ppo:nothing", "ppo:../../etc", "jsq@/etc", "nonsense", ""):
                assert await asyncio.to_thread(manage, "digits/policy", {"router": wrong}) in (400, 404)
            assert await asyncio.to_thread(manage, "..%2F..%2Fetc/load") == 404
            before = answered
            while answered < before + 50:
                await asyncio.sleep(0.01)
            stop.set()
            await asyncio.gather(*callers)
        found = metrics(server.http)
        conserved(found)
        assert found['slim_requests_total{model="digits",outcome="answered"}'] == answered + 2
        index = {row["name"]: row for row in call(server.http, "POST", "/v2/repository/index")[2]}
        assert index["digits"]["state"] == "READY"
        assert index["broken"]["state"] == "UNAVAILABLE"


@pytest.mark.timeout(180)
async def test_several_managers_load_unload_and_swap_learned_policies_at_once_under_load(tmp_path, images):
    models = tmp_path / "models"
    for name in ("digits", "other"):
        shutil.copytree(ROOT / "models/digits", models / name)
    (models / "broken").mkdir()
    (models / "broken/manifest.json").write_text("{}")
    shutil.copytree(ROOT / "examples/demo/policies", tmp_path / "policies")
    (tmp_path / "policies/torn").mkdir()
    config = {"model": models / "digits", "router": f"ppo:{tmp_path / 'policies/balanced'}"}
    with serving(tmp_path, config=config) as server:
        stop = asyncio.Event()
        answered = {"digits": 0, "other": 0}
        managed: Counter[tuple[str, int]] = Counter()

        async def caller(model: str, tolerated: tuple[int, ...]) -> None:
            async with AsyncSlimClient(server.url, model=model) as client:
                while not stop.is_set():
                    try:
                        await client.infer(images[:1])
                        answered[model] += 1
                    except RefusedError as refused:
                        if refused.status not in tolerated:
                            raise
                        await asyncio.sleep(0.01)

        async def manager(path: str, *bodies: dict[str, str]) -> None:
            """Does the same again and again, as nobody else were there."""
            for body in bodies * 6:
                status = await asyncio.to_thread(call, server.management, "POST", f"/v2/repository/models/{path}", body)
                managed[path, status[0]] += 1

        learned = ({"router": "ppo:balanced"}, {"router": "ppo:efficiency"})
        callers = [asyncio.create_task(caller("digits", ())) for _ in range(6)]
        callers += [asyncio.create_task(caller("other", (503,))) for _ in range(3)]
        await asyncio.gather(
            manager("digits/policy", *learned),
            manager("digits/policy", {"router": "jsq:0.25"}, {"router": "ppo:torn"}),
            manager("digits/load", {}),
            manager("other/load", {}, {}),
            manager("other/unload", {}),
            manager("other/unload", {}),
            manager("other/policy", *learned),
            manager("broken/load", {}),
        )
        stop.set()
        await asyncio.gather(*callers)
        for (path, status), count in managed.items():
            allowed = {"digits/policy": {200, 400}, "digits/load": {200}, "other/load": {200}, "broken/load": {400}}
            assert status in allowed.get(path, {200, 404, 503}), (path, status, count)
        assert managed["digits/policy", 400] == 6, "the torn one, every time"
        assert answered["digits"] > 0
        assert answered["other"] > 0
        assert call(server.management, "POST", "/v2/repository/models/digits/policy", learned[0])[0] == 200
        assert call(server.management, "POST", "/v2/repository/models/other/load", {})[0] == 200
        for model in ("digits", "other"):
            assert infer(server.http, images, f"/v2/models/{model}/infer")[0] == 200
        found = metrics(server.http)
        assert found['slim_requests_total{model="digits",outcome="answered"}'] == answered["digits"] + 1
        for outcome in ("failed", "expired", "rejected"):
            assert found[f'slim_requests_total{{model="digits",outcome="{outcome}"}}'] == 0
        for unit in ("requests", "items"):
            ended = sum(v for k, v in found.items() if k.startswith(f'slim_{unit}_total{{model="digits"'))
            assert found[f'slim_{unit}_received_total{{model="digits"}}'] == ended


def test_unloaded_is_unavailable_and_loads_again(tmp_path, images):
    with serving(tmp_path) as server:
        assert call(server.management, "POST", "/v2/repository/models/digits/unload", {})[0] == 200
        assert call(server.http, "GET", "/v2/health/ready")[0] == 503
        assert call(server.http, "GET", "/v2/models/digits/ready")[0] == 503
        status, fields, _ = infer(server.http, images)
        assert status == 503
        assert "retry-after" in fields
        assert call(server.management, "POST", "/v2/repository/models/digits/load", {})[0] == 200
        assert infer(server.http, images)[0] == 200
        assert call(server.http, "POST", "/v2/repository/models/digits/unload", {})[0] == 403
        assert call(server.management, "POST", "/v2/models/digits/infer", {})[0] == 404


def test_management_over_grpc_has_a_listener_of_its_own(tmp_path, images):
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    tensor = triton.InferInput("image", [3, 1, 8, 8], "FP32")
    tensor.set_data_from_numpy(images)
    with (
        serving(tmp_path) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as public,
        triton.InferenceServerClient(f"127.0.0.1:{server.management_grpc}") as manager,
    ):
        with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
            public.unload_model("digits")
        manager.unload_model("digits")
        assert not public.is_server_ready()
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            public.infer("digits", [tensor])
        with pytest.raises(InferenceServerException, match="NOT_FOUND"):
            manager.unload_model("digits")
        with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*takes no parameters"):
            manager.load_model("digits", config="{}")
        manager.load_model("digits")
        states = {row.name: row.state for row in manager.get_model_repository_index().models}
        assert states["digits"] == "READY"
        assert public.infer("digits", [tensor]).as_numpy("logits").shape == (3, 10)
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            manager.infer("digits", [tensor])


def test_a_token_is_asked_for_over_http_and_grpc(tmp_path, images):
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    with serving(tmp_path, "--host", "0.0.0.0", SLIM_TOKEN=TOKEN) as server:
        assert infer(server.http, images)[0] == 401
        assert call(server.http, "GET", "/metrics")[0] == 401
        assert call(server.management, "POST", "/v2/repository/models/digits/unload")[0] == 401
        assert call(server.http, "GET", "/v2/health/ready")[0] == 200
        with SlimClient(server.url, token=TOKEN) as client:
            assert client.infer(images).logits.shape == (3, 10)
        tensor = triton.InferInput("image", [3, 1, 8, 8], "FP32")
        tensor.set_data_from_numpy(images)
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            with pytest.raises(InferenceServerException, match="needs a token"):
                client.infer("digits", [tensor])
            with pytest.raises(InferenceServerException, match="needs a token"):
                client.is_server_ready()
            answer = client.infer("digits", [tensor], headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.as_numpy("logits").shape == (3, 10)


def test_overload_is_refused_with_retry_after_and_memory_stays(tmp_path, images):
    refused_in_a_flood(tmp_path, images)


@pytest.mark.accept
def test_overload_is_refused_within_10_ms(tmp_path, images):
    found = refused_in_a_flood(tmp_path, images)
    in_server = 'slim_request_seconds_bucket{le="%s",model="digits",outcome="rejected"}'
    assert found[in_server % "0.01"] / found[in_server % "+Inf"] >= 0.99


def refused_in_a_flood(tmp_path, images) -> dict[str, float]:
    """600 requests at once, twice, to a server that can take few; returns its metrics."""
    with serving(tmp_path, config=SLOW | {"waiting": 50}) as server:

        async def flood() -> tuple[list[int], int]:
            statuses, refusals = [], 0

            async def one(client: AsyncSlimClient) -> None:
                nonlocal refusals
                try:
                    await client.infer(images[:1], Constraints(deadline_ms=3000))
                    statuses.append(200)
                except RefusedError as refused:
                    statuses.append(refused.status)
                    if re.search("limit is 50|of work wait", str(refused)) and refused.retry_after is not None:
                        refusals += 1

            async with AsyncSlimClient(server.url) as client:
                await asyncio.gather(*(one(client) for _ in range(600)))
            return statuses, refusals

        process = psutil.Process(server.process.pid)
        asyncio.run(flood())
        before = process.memory_info().rss
        statuses, refusals = asyncio.run(flood())
        assert set(statuses) <= {200, 503}
        assert refusals > 300
        assert process.memory_info().rss - before < 32 << 20
        found = metrics(server.http)
        conserved(found)
        return found


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        (("--host", "0.0.0.0"), {}, "opens the server to the network"),
        (("--layout", "HWCN"), {}, "layout HWCN is not known"),
        ((), {"model": "no/such"}, "does not exist"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line_and_exit_2(tmp_path, options, config, words):
    with pytest.raises(AssertionError, match="exit 2") as caught, serving(tmp_path, *options, config=config):
        pass
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_channels_last_is_served_where_asked_for(tmp_path, images):
    with serving(tmp_path, "--layout", "NHWC") as server:
        inputs = call(server.http, "GET", "/v2/models/digits")[2]["inputs"]
        assert inputs[0]["shape"] == [-1, 8, 8, 1]
        with SlimClient(server.url) as client:
            assert client.infer(images.transpose(0, 2, 3, 1)).logits.shape == (3, 10)
        config = call(server.http, "GET", "/v2/models/digits/config")[2]
        assert config["input"][0]["format"] == "FORMAT_NHWC"
        assert json.dumps(config)
