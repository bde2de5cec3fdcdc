"""Second passes over HTTP and gRPC: every answer is of its own input, at its widths and as sure as it says.

Each request's image is another one, the nonce: its logits, margin and confidence at every width are known beforehand.
"""

import asyncio
from collections import Counter

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from slim_scheduler.client import AsyncSlimClient, Constraints, Prediction, RefusedError, SlimClient
from slim_scheduler.core.types import WidthTuple
from slim_scheduler.model.calibration import margins_of
from slim_scheduler.model.folder import load_model
from slim_scheduler.setup.accuracy_files import read_accuracy
from tests.serve.conftest import ROOT, Running, serving
from tests.serve.test_lifecycle import conserved
from tests.serve.wire import call, metrics

MODEL = ROOT / "models/digits"
NARROW, WIDE = (0.25,) * 4, (1.0,) * 4
RESUMED = (0.25, 0.25, 1.0, 1.0)  # goes on from the activation of the first pass
THRESHOLD = 0.4  # of the router: about half of the nonces are below it
FLOOR = 0.8
NEAR = 1e-3  # of a threshold or floor: batches round differently
CALLERS = 24


class Known:
    """What the network answers to each nonce, computed here. `second`: the router's second tuple."""

    def __init__(self, nonces: int, seed: int, second: WidthTuple) -> None:
        rng = np.random.default_rng(seed)
        self.second = second
        self.images = rng.standard_normal((nonces, 1, 8, 8), dtype=np.float32)
        network, self.calibration = load_model(MODEL), read_accuracy(MODEL).calibration
        with torch.inference_mode():
            batch = torch.from_numpy(self.images)
            outputs = {widths: network(batch, widths) for widths in {NARROW, WIDE, second}}
        self.logits = {widths: output.numpy() for widths, output in outputs.items()}
        self.margins = {widths: margins_of(output).numpy() for widths, output in outputs.items()}

    def confidence(self, nonce: int, widths: WidthTuple) -> float:
        return self.calibration.confidence(widths[-1], float(self.margins[widths][nonce]))

    def check(self, nonce: int, wish: Constraints, got: Prediction) -> str:
        """The answer is this nonce's, and it ran as often as its own margin says. How it ended, in a word."""
        widths = tuple(float(width) for width in got.widths.split(","))
        assert np.allclose(got.logits[0], self.logits[widths][nonce], atol=1e-3), f"{nonce} got another's logits"
        assert abs(got.confidence - self.confidence(nonce, widths)) < NEAR, f"{nonce} got another's margin"
        floor = wish.confidence_floor
        of, least = float(self.margins[NARROW][nonce]), THRESHOLD
        if floor is not None:
            of, least = self.confidence(nonce, NARROW), floor
        if got.passes == 2:
            asked = self.second if floor is None else WIDE
            assert (widths, got.other_widths) == (asked, "0.25,0.25,0.25,0.25")
            assert of < least + NEAR, f"{nonce} ran twice and was sure"
            assert 0 < got.other_compute_ms < got.compute_ms
            return "twice"
        assert widths == NARROW
        if of < least - NEAR:
            assert wish.deadline_ms is not None, f"{nonce} was not sure and had time"
            assert wish.anytime or floor is None
            return "first in time"
        return "once"


WISHES = (
    Constraints(),
    Constraints(confidence_floor=FLOOR),
    Constraints(deadline_ms=2000.0),
    Constraints(deadline_ms=12.0),
    Constraints(deadline_ms=12.0, confidence_floor=FLOOR),
    Constraints(deadline_ms=40.0, confidence_floor=FLOOR, anytime=False),
)


def over_grpc(image: np.ndarray, wish: Constraints) -> object:
    made = pb.ModelInferRequest(model_name="digits")
    made.inputs.add(name="image", datatype="FP32", shape=image.shape)
    made.raw_input_contents.append(image.tobytes())
    for name in ("deadline_ms", "confidence_floor"):
        if (value := getattr(wish, name)) is not None:
            made.parameters[name].double_param = value
    if not wish.anytime:
        made.parameters["anytime"].bool_param = False
    return made


def read_grpc(answer: object) -> Prediction:
    told = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in answer.parameters.items()}
    logits = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)
    return Prediction(logits, **told)


def refused_by_grpc(error: grpc.aio.AioRpcError, wish: Constraints, patience: float) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and patience < 60.0:
        return "left"
    has_deadline = wish.deadline_ms is not None or patience < 60.0
    return "refused" if error.code() is grpc.StatusCode.UNAVAILABLE and has_deadline else str(error)


async def mixed(server: Running, known: Known, requests: int, scrapes: int) -> Counter[str]:
    """Each request has one end: answered as it should be, refused for its deadline, or left by its client."""
    ends: Counter[str] = Counter()
    numbers = iter(range(requests))

    async def caller(seed: int, client: AsyncSlimClient | None, stub: object | None) -> None:
        own = np.random.default_rng(seed)
        for nonce in numbers:
            wish = WISHES[int(own.integers(len(WISHES)))]
            patience = float(own.uniform(0.0, 0.02)) if own.random() < 0.05 else 60.0
            image = known.images[nonce : nonce + 1]
            try:
                if client is not None:
                    async with asyncio.timeout(patience):
                        got = await client.infer(image, wish)
                else:
                    got = read_grpc(await stub.ModelInfer(over_grpc(image, wish), timeout=patience))
            except TimeoutError:
                ends["left"] += 1
            except RefusedError as refused:
                ends["refused" if refused.status == 503 and wish.deadline_ms is not None else str(refused)] += 1
            except grpc.aio.AioRpcError as error:
                ends[refused_by_grpc(error, wish, patience)] += 1
            else:
                ends[known.check(nonce, wish, got)] += 1

    async def scrape() -> None:
        while ends.total() < requests:
            conserved(await asyncio.to_thread(metrics, server.http))
            await asyncio.sleep(0.02)
            ahead = ends.total() + requests / scrapes
            while ends.total() < min(ahead, requests):
                await asyncio.sleep(0.02)

    async with (
        AsyncSlimClient(server.url) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}") as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        half = CALLERS // 2
        http = [caller(seed, client, None) for seed in range(half)]
        rpc = [caller(half + seed, None, stub) for seed in range(half)]
        await asyncio.gather(scrape(), *http, *rpc)
    return ends


def run(tmp_path: object, second: WidthTuple, requests: int, scrapes: int) -> None:
    known = Known(requests, requests, second)
    router = f"jsq:0.25+{'/'.join(map(str, second))}@{THRESHOLD}"
    exact = [text for number in (0, 1) for text in ("--set", f"servers.{number}.max_upgrade=0")]
    with serving(tmp_path, *exact, config={"router": router, "slowdown": 4.0}) as server:
        ends = asyncio.run(mixed(server, known, requests, scrapes))
        assert set(ends) <= {"once", "twice", "first in time", "refused", "left"}, ends
        assert ends.total() == requests
        assert min(ends["once"], ends["twice"]) > requests / 20, ends
        found = metrics(server.http)
        conserved(found)
        assert found['slim_items_in_flight{model="digits"}'] == 0
        unseen = requests - found['slim_requests_received_total{model="digits"}']
        assert 0 <= unseen <= ends["left"] + ends["refused"], "who left before the server had read it is not counted"


@pytest.mark.parametrize("second", [WIDE, RESUMED])
def test_mixed_requests_have_one_end_each_and_margins_are_of_their_own_item(tmp_path, second):
    run(tmp_path, second, 800, scrapes=8)


@pytest.mark.accept
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("second", [WIDE, RESUMED])
def test_twenty_thousand_mixed_requests_have_one_end_each(tmp_path, second):
    run(tmp_path, second, 20_000, scrapes=100)


# ---- what a request may ask, on the server without escalation


def test_a_confidence_floor_runs_the_unsure_again_over_http_and_grpc(server):
    known = Known(64, 5, WIDE)
    wish = Constraints(width=0.25, confidence_floor=FLOOR)
    with SlimClient(server.url) as client, grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        ends = Counter()
        for nonce in range(64):
            image = known.images[nonce : nonce + 1]
            ends[known.check(nonce, wish, client.infer(image, wish))] += 1
            asked = over_grpc(image, wish)
            asked.parameters["width"].double_param = 0.25
            ends[known.check(nonce, wish, read_grpc(stub.ModelInfer(asked)))] += 1
        assert ends["once"] + ends["twice"] == 128
        assert min(ends.values()) > 16
        together = client.infer(known.images, wish)
    assert np.allclose([float(c) for c in together.item_confidence.split(";")], [
        known.confidence(n, WIDE if p == "2" else NARROW) for n, p in enumerate(together.item_passes.split(";"))
    ], atol=NEAR)  # fmt: skip
    assert (together.passes, len(together.other_widths.split(";"))) == (2, 64)


def test_a_model_without_measured_confidence_refuses_the_floor_or_gives_it_up(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    for name in ("manifest.json", "weights.safetensors"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    image = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}
    with serving(tmp_path, config={"model": folder}) as server:
        wish = {"inputs": [image], "parameters": {"confidence_floor": 0.9}}
        status, _, refused = call(server.http, "POST", "/v2/models/digits/infer", wish)
        assert (status, "run `slim accuracy` on it" in refused["error"]) == (400, True)
        wish["parameters"]["unmet"] = "answer"
        status, _, answered = call(server.http, "POST", "/v2/models/digits/infer", wish)
        assert (status, answered["parameters"]["unmet"]) == (200, "confidence_floor")
        assert "confidence" not in answered["parameters"]
