"""The clients that people have: each runs real inference against a real server."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from slim_scheduler.client.client import AsyncSlimClient, Constraints, RefusedError, SlimClient, infer_body
from slim_scheduler.core.errors import InputError
from tests.serve.wire import Wire, answers, hangs_up, scripted, stays_silent

KSERVE_PYTHON = Path(__file__).parents[2] / ".venv-kserve/bin/python"


@pytest.fixture(scope="module")
def expected(server):
    """The logits of the images, by the plainest request there is."""
    images = np.random.default_rng(7).standard_normal((3, 1, 8, 8), dtype=np.float32)
    with SlimClient(server.url) as client:
        return client.infer(images).logits


def triton_input(module, images, **binary):
    tensor = module.InferInput("image", list(images.shape), "FP32" if images.dtype == np.float32 else "UINT8")
    tensor.set_data_from_numpy(images, **binary)
    return tensor


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_http(server, images, expected, binary_in, binary_out):
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits", "1")
        result = client.infer(
            "digits",
            [triton_input(triton_http, images, binary_data=binary_in)],
            outputs=[triton_http.InferRequestedOutput("logits", binary_data=binary_out)],
            request_id="42",
            timeout=10_000_000,
            parameters={"width": 0.5},
        )
    assert np.allclose(result.as_numpy("logits"), expected, atol=1e-4)
    assert result.get_response()["id"] == "42"
    assert result.get_response()["parameters"]["widths"] == "0.5,0.5,0.5,0.5"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_tritonclient_http_compressed(server, images, expected, algorithm):
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        result = client.infer(
            "digits",
            [triton_input(triton_http, images)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    assert np.allclose(result.as_numpy("logits"), expected, atol=1e-4)


def test_tritonclient_http_labels_and_documents(server, images):
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        outputs = [triton_http.InferRequestedOutput("logits", class_count=2)]
        labels = client.infer("digits", [triton_input(triton_http, images)], outputs=outputs).as_numpy("logits")
        assert labels.shape == (3, 2)
        assert labels[0][0].decode().count(":") == 2
        assert client.get_server_metadata()["name"] == "slim_scheduler"
        assert client.get_model_metadata("digits")["inputs"][0]["name"] == "image"
        assert client.get_model_config("digits")["input"][0]["dims"] == [1, 8, 8]
        assert client.get_inference_statistics("digits")["model_stats"][0]["name"] == "digits"
        assert client.get_model_repository_index()[0]["name"]
        with pytest.raises(InferenceServerException, match="does not exist"):
            client.infer("nothing", [triton_input(triton_http, images)])


async def test_tritonclient_http_asyncio(server, images, expected):
    async with triton_http_aio.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        result = await client.infer("digits", [triton_input(triton_http_aio, images)])
    assert np.allclose(result.as_numpy("logits"), expected, atol=1e-4)


def test_tritonclient_grpc(server, images, expected):
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        result = client.infer(
            "digits",
            [triton_input(triton_grpc, images)],
            outputs=[triton_grpc.InferRequestedOutput("logits")],
            request_id="42",
            parameters={"width": 0.5, "deadline_ms": 10_000},
        )
        assert np.allclose(result.as_numpy("logits"), expected, atol=1e-4)
        told = result.get_response().parameters
        assert told["widths"].string_param == "0.5,0.5,0.5,0.5"
        assert told["compute_ms"].double_param > 0
        outputs = [triton_grpc.InferRequestedOutput("logits", class_count=2)]
        assert client.infer("digits", [triton_input(triton_grpc, images)], outputs=outputs).as_numpy(
            "logits"
        ).shape == (3, 2)
        assert client.get_server_metadata().name == "slim_scheduler"
        assert list(client.get_model_metadata("digits").inputs[0].shape) == [-1, 1, 8, 8]
        assert client.get_model_config("digits").config.max_batch_size == 4096
        assert client.get_inference_statistics("digits").model_stats[0].inference_count >= 3
        assert client.get_model_repository_index().models[0].name
        for wrong, code in (
            (lambda: client.infer("nothing", [triton_input(triton_grpc, images)]), "NOT_FOUND"),
            (
                lambda: client.infer("digits", [triton_input(triton_grpc, images)], parameters={"width": 0.6}),
                "INVALID_ARGUMENT",
            ),
            (lambda: client.load_model("digits"), "PERMISSION_DENIED"),
            (client.get_system_shared_memory_status, "UNIMPLEMENTED"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                wrong()
            assert code in caught.value.status()


def test_tritonclient_grpc_stream_keeps_the_order(server, images, expected):
    answers = []
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(callback=lambda result, error: answers.append((result, error)))
        for number in range(20):
            row = images[number % 3 : number % 3 + 1]
            client.async_stream_infer("digits", [triton_input(triton_grpc, row)], request_id=str(number))
        client.async_stream_infer("nothing", [triton_input(triton_grpc, images)])
        client.stop_stream()
    assert [result.get_response().id for result, _ in answers[:20]] == [str(number) for number in range(20)]
    for number, (result, _) in enumerate(answers[:20]):
        assert np.allclose(result.as_numpy("logits")[0], expected[number % 3], atol=1e-4)
    assert "does not exist" in str(answers[20][1])


async def test_tritonclient_grpc_asyncio(server, images, expected):
    async with triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        result = await client.infer("digits", [triton_input(triton_grpc_aio, images)])
    assert np.allclose(result.as_numpy("logits"), expected, atol=1e-4)


def test_curl(server, images, expected):
    document = {
        "inputs": [{"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}]
    }
    command = ["curl", "-sS", "--fail", "--compressed", "-X", "POST", "-H", "Content-Type: application/json"]
    url = f"{server.url}/v2/models/digits/infer"
    done = subprocess.run(
        [*command, "--data-binary", "@-", url], input=json.dumps(document).encode(), capture_output=True, check=True
    )
    output = json.loads(done.stdout)["outputs"][0]
    assert np.allclose(np.reshape(output["data"], output["shape"]), expected, atol=1e-4)


def test_curl_sends_chunked_bodies_and_waits_for_continue(server, images, expected):
    head = ["-H", "Inference-Header-Content-Length: 0", "-H", "Expect: 100-continue"]
    for more in ([], ["-H", "Transfer-Encoding: chunked"]):
        done = subprocess.run(
            ["curl", "-sS", "--fail", *head, *more, "--data-binary", "@-", f"{server.url}/v2/models/digits/infer"],
            input=images.tobytes(),
            capture_output=True,
            check=True,
        )
        assert np.allclose(np.frombuffer(done.stdout[-120:], "<f4").reshape(3, 10), expected, atol=1e-4)


def test_curl_that_offers_http_2(server, images, expected):
    document = {
        "inputs": [{"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}]
    }
    url = f"{server.url}/v2/models/digits/infer"
    command = ["curl", "-sS", "--fail", "--http2", "-d", json.dumps(document), url, url]
    done = subprocess.run([*command, "-w", " %{num_connects}\n"], capture_output=True, check=True)
    replies = [line.rpartition(b" ") for line in done.stdout.splitlines()]
    for reply, _, _ in replies:
        output = json.loads(reply)["outputs"][0]
        assert np.allclose(np.reshape(output["data"], output["shape"]), expected, atol=1e-4)
    assert [connects for _, _, connects in replies] == [b"1", b"0"], "the connection is still in step"


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK (apt install openjdk-17-jdk-headless)")
def test_javas_http_client_that_offers_http_2(server, images, expected, tmp_path):
    body, length = infer_body(images)
    (tmp_path / "body").write_bytes(body)
    program = Path(__file__).with_name("JavaClient.java")
    url = f"{server.url}/v2/models/digits/infer"
    done = subprocess.run(
        ["java", program, url, tmp_path / "body", str(length), tmp_path / "reply"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["200", "HTTP_1_1", "200", "HTTP_1_1"]
    logits = np.frombuffer((tmp_path / "reply").read_bytes()[-120:], "<f4").reshape(3, 10)
    assert np.allclose(logits, expected, atol=1e-4)


@pytest.mark.skipif(shutil.which("ab") is None, reason="no ab (apt install apache2-utils)")
def test_ab_keeps_its_connections(server, images, tmp_path):
    body, length = infer_body(images)
    (tmp_path / "body").write_bytes(body)
    command = ["ab", "-k", "-n", "200", "-c", "4", "-p", tmp_path / "body", "-T", "application/octet-stream"]
    command += ["-H", f"Inference-Header-Content-Length: {length}", f"{server.url}/v2/models/digits/infer"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Complete requests:      200" in text
    assert "Keep-Alive requests:    200" in text
    assert "Non-2xx" not in text


def test_http_1_0_client_keeps_its_connection(server, images, expected):
    with Wire(server.http) as wire:
        for image, logits in zip(images, expected, strict=True):
            request = wire.request(image[None], connection="Keep-Alive").replace(b" HTTP/1.1", b" HTTP/1.0", 1)
            wire.send(request)
            status, found = wire.answer()
            assert status == 200
            assert np.allclose(found, logits, atol=1e-4)
        wire.send(request.replace(b"Keep-Alive", b"close"))
        assert wire.answer()[0] == 200
        assert wire.closed()


def test_a_client_that_sends_its_end_after_the_request_is_answered(server, images, expected):
    for turn in range(20):
        with Wire(server.http) as wire:
            wire.send(wire.request(images[turn % 3][None]))
            wire.end()
            status, logits = wire.answer()
            assert status == 200
            assert np.allclose(logits, expected[turn % 3], atol=1e-4)
            assert wire.closed()


@pytest.mark.skipif(not KSERVE_PYTHON.exists(), reason="`make .venv-kserve/.installed` makes kserve's environment")
@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_kserve_client(server, images, expected, protocol, tmp_path):
    """In a process of its own: its gRPC stubs and tritonclient's cannot be loaded together."""
    np.save(tmp_path / "images.npy", images)
    program = Path(__file__).with_name("kserve_program.py")
    port = server.http if protocol == "rest" else server.grpc
    done = subprocess.run(
        [KSERVE_PYTHON, program, protocol, str(port), tmp_path / "images.npy"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert np.allclose(json.loads(done.stdout.splitlines()[-1]), expected, atol=1e-4)


def test_our_client_knows_what_an_answer_cost(server, images, expected):
    with SlimClient(server.url) as client:
        assert client.ready()
        assert client.metadata()["name"] == "digits"
        prediction = client.infer(images, Constraints(widths=(0.5, 0.5, 0.5, 0.5), priority=1, deadline_ms=10_000))
        assert prediction.widths == "0.5,0.5,0.5,0.5"
        assert np.array_equal(prediction.classes, expected.argmax(axis=1))
        assert prediction.compute_ms > 0
        with pytest.raises(RefusedError, match=r"width 0\.6 is not served") as caught:
            client.infer(images, Constraints(width=0.6))
        assert caught.value.status == 400
        with pytest.raises(RefusedError) as caught:
            client.infer(images, Constraints(deadline_ms=0.001))
        assert caught.value.retry_after >= 1
        with pytest.raises(InputError, match=r"widths are '0\.5,1'; give one number per segment"):
            client.infer(images, Constraints(widths="0.5,1"))


async def test_our_async_client(server, images, expected):
    async with AsyncSlimClient(server.url) as client:
        assert await client.ready()
        prediction = await client.infer(images)
        assert np.allclose(prediction.logits, expected, atol=1e-4)


def test_a_request_is_sent_again_where_the_server_had_closed_the_kept_connection():
    with scripted(answers(), answers()) as url, SlimClient(url) as client:
        assert client.ready()
        assert client.ready()


def test_a_client_works_on_after_a_request_that_timed_out():
    with scripted(stays_silent, answers()) as url, SlimClient(url, timeout_s=1.0) as client:
        with pytest.raises(TimeoutError):
            client.ready()
        assert client.ready()


def test_a_new_connection_that_is_lost_is_no_reason_to_ask_again():
    with scripted(hangs_up, answers()) as url, SlimClient(url) as client:
        with pytest.raises(ConnectionError):
            client.ready()
        assert client.ready()


async def test_our_async_client_passes_over_connections_that_the_server_closed():
    with scripted(answers(), answers()) as url:
        async with asyncio.timeout(20), AsyncSlimClient(url) as client:
            assert await client.ready()
            (kept,) = client._kept._free
            while kept.open_for_more:
                await asyncio.sleep(0.001)
            assert await client.ready()


async def test_the_time_that_connecting_takes_counts_for_the_timeout():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):  # that nobody accepts; for another the queue is full
            client = AsyncSlimClient(f"http://127.0.0.1:{address[1]}", timeout_s=0.1)
            async with asyncio.timeout(20):
                with pytest.raises(TimeoutError):
                    await client.ready()


def test_the_client_needs_none_of_the_servers_packages():
    program = (
        "import sys, slim_scheduler.client.client as c; "
        "heavy = {'torch', 'grpc', 'uvicorn', 'starlette', 'tritonclient', 'prometheus_client'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
