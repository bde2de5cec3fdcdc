"""`slim serve` and `slim load`: the server, and load on a running one."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slim_scheduler.cli.family import Labels, Means, Stds, found_here, model_folder, wishes_of
from slim_scheduler.cli.options import examples
from slim_scheduler.cli.terminal import print_json

if TYPE_CHECKING:
    from slim_scheduler.client.load import LoadResult

HTTP_PORT = 8000
GRPC_PORT = 8001


def add(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "slim serve models/digits",
            "slim serve resnet18.onnx resnet50.onnx --data val/",
            "slim serve --config examples/demo/cluster.toml",
            "slim serve -c examples/demo/cluster.toml --router ppo:examples/demo/policies/balanced --port 8080",
            "SLIM_TOKEN=... slim serve -c cluster.toml --host 0.0.0.0 --allow-host gpu.example.org",
        )
    )(serve)
    app.command(
        epilog=examples(
            "slim load --rate 200 --duration 10 --deadline-ms 200",
            "slim load --url grpc://127.0.0.1:8001 --concurrency 32 --json",
        )
    )(load)


def serve(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MODEL | FILE...]", help="A model folder, or .onnx and .pt2 files of one task."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The servers, the model and the router, a TOML file.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Images to measure FILEs on, as `slim import`.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Without --config: fp32, bf16, fp16 or auto; fp32 by default.")
    ] = None,
    labels: Labels = None,
    mean: Means = None,
    std: Stds = None,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(min=-1, max=65535, help="gRPC port; -1 for none.")] = GRPC_PORT,
    management_port: Annotated[
        int, typer.Option(min=-1, max=65535, help="Load, unload and policy, on loopback only; -1 for none.")
    ] = -1,
    management_grpc_port: Annotated[
        int, typer.Option(min=-1, max=65535, help="Load and unload over gRPC, on loopback only; -1 for none.")
    ] = -1,
    token: Annotated[str | None, typer.Option(help="What clients must send; better in SLIM_TOKEN.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of this server, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Clients need a certificate of this CA, PEM.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A Host name that is served; repeatable.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="An Origin that may ask; repeatable.")] = None,
    layout: Annotated[str, typer.Option(help="Order of an image's axes: NCHW or NHWC.")] = "NCHW",
    drain_delay_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds after SIGTERM in which a server that is not ready serves on.")
    ] = 2.0,
    grace_s: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds that requests in flight have after that; a batch that runs on has 5 more."),
    ] = 30.0,
    head_timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest time for a request's head.")] = 10.0,
    body_timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest time for a request's body.")] = 30.0,
    router: Annotated[
        str | None, typer.Option("--router", "-r", help="Such as jsq:0.5, lp; the file's by default.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything left to chance.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key; repeatable.")
    ] = None,
) -> None:
    """The server: Open Inference Protocol over HTTP and gRPC, metrics, and the live page at /.

    With a MODEL or FILEs and no configuration it takes what is here: devices, the fastest engine, a profile that is
    measured once, and a router.
    """
    import logging

    from slim_scheduler.core.errors import ConfigError
    from slim_scheduler.serve.access import Access, token_from_environment
    from slim_scheduler.serve.limits import Limits
    from slim_scheduler.serve.server import serve as run
    from slim_scheduler.setup.config import load_config, with_overrides

    if layout not in ("NCHW", "NHWC"):
        raise ConfigError(f"layout {layout} is not known; give NCHW or NHWC")
    if models and config is not None:
        raise ConfigError("a model and --config are both given; a configuration names its model: give one of the two")
    if not models and config is None:
        raise ConfigError("give --config FILE, or a model folder, or two or more .onnx or .pt2 files")
    of_files = {"--data": data, "--labels": labels, "--mean": mean, "--std": std}
    if config is not None:
        _refuse_beside("--config", {"--precision": precision, **of_files})
    elif model_folder(models or []):
        _refuse_beside("a model folder", of_files)
    chosen = [*(overrides or ()), *([f"router.name={router}"] if router else ())]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    certificate = str(tls_cert) if tls_cert else None
    key, client_ca = str(tls_key) if tls_key else None, str(tls_client_ca) if tls_client_ca else None
    if config is not None:
        loaded = load_config(config, tuple(chosen))
    else:
        secret = token_from_environment(token)
        Access(host, secret, certificate, key, client_ca, insecure).check()  # before minutes of measuring
        found = found_here(models or [], data, lambda: wishes_of(labels, None, None, mean, std), precision or "fp32")
        loaded = with_overrides(found, chosen)
    run(
        loaded,
        host,
        port,
        None if grpc_port < 0 else grpc_port,
        token,
        insecure,
        management_port=None if management_port < 0 else management_port,
        management_grpc_port=None if management_grpc_port < 0 else management_grpc_port,
        allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
        certificate=certificate,
        key=key,
        client_ca=client_ca,
        layout="NCHW" if layout == "NCHW" else "NHWC",
        seed=seed,
        drain_delay_s=drain_delay_s,
        grace_s=grace_s,
        limits=Limits(head_timeout_s=head_timeout_s, body_timeout_s=body_timeout_s),
        announce=lambda line: print(line, flush=True),
    )


def _refuse_beside(what: str, options: Mapping[str, object]) -> None:
    from slim_scheduler.core.errors import ConfigError

    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} beside {what} would change nothing: it has its own; leave it out")


def load(
    url: Annotated[str, typer.Option(help="http://HOST:PORT or grpc://HOST:PORT.")] = f"http://127.0.0.1:{HTTP_PORT}",
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second, Poisson.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: requests at the same time.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds that are measured.")] = 10.0,
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds before that.")] = 1.0,
    items: Annotated[int, typer.Option(min=1, help="Images per request.")] = 1,
    uint8: Annotated[bool, typer.Option("--uint8", help="Send pixels instead of normalised floats.")] = False,
    model: Annotated[str | None, typer.Option(help="Model; the server's first by default.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="Deadline of each request; counts for goodput.")] = None,
    accuracy_floor: Annotated[float | None, typer.Option(help="Least expected accuracy, 0 to 1.")] = None,
    confidence_floor: Annotated[float | None, typer.Option(help="Less sure answers run again, 0 to 1.")] = None,
    width: Annotated[float | None, typer.Option(help="One width for all segments.")] = None,
    connections: Annotated[int, typer.Option(min=1, help="Most connections in open loop; opened as needed.")] = 4000,
    token: Annotated[str | None, typer.Option(help="The server's token; better in SLIM_TOKEN.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of arrivals and inputs.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the JSON result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Load on a running server, open loop (--rate) or closed loop (--concurrency)."""
    import msgspec

    from slim_scheduler.client.client import Constraints
    from slim_scheduler.client.load import check_load
    from slim_scheduler.client.load import load as run
    from slim_scheduler.core.errors import ConfigError
    from slim_scheduler.serve.access import token_from_environment

    constraints = Constraints(
        deadline_ms=deadline_ms, accuracy_floor=accuracy_floor, confidence_floor=confidence_floor, width=width
    )
    check_load(rate, concurrency, duration, items, warmup, deadline_ms)
    if out is not None:
        if out.is_dir():
            raise ConfigError(f"{out} is a folder; --out is the file for the result")
        from slim_scheduler.run.runs import make_folder

        make_folder(out.parent)
    print(f"load on {url} for {warmup + duration:g} s ...", file=sys.stderr, flush=True)
    result = run(
        url,
        rate,
        concurrency,
        duration,
        model=model,
        items=items,
        datatype="UINT8" if uint8 else "FP32",
        constraints=constraints,
        token=token_from_environment(token),
        connections=connections,
        warmup=warmup,
        seed=seed,
    )
    document = msgspec.to_builtins(result)
    if out is not None:
        from slim_scheduler.run.runs import write_json

        write_json(out, document)
    if as_json:
        print_json(document)
        _conclude(result)
        return
    latency = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in result.latency_s.items() if name != "sd")
    print(f"{result.sent} requests in {result.duration_s:.1f} s: {result.answered} answered, {result.refused} refused, "
          f"{result.errors} errors")  # fmt: skip
    print(f"throughput {result.throughput_items_s:.1f} items/s, goodput {result.goodput_items_s:.1f} items/s")
    print(f"latency (ms): {latency or 'none answered'}")
    for status, reason in result.reasons.items():
        print(f"first {status}: {reason}")
    if not result.valid:
        lag = result.generator_lag_s["p99"] * 1e3
        print(f"not valid: the generator itself was {lag:.1f} ms late (p99); use a lower rate or another machine")
    _conclude(result)


def _conclude(result: "LoadResult") -> None:
    """A script must not take a load that was interrupted, or of which nothing was answered, for a success."""
    if result.interrupted:
        raise KeyboardInterrupt
    if result.sent and not result.answered:
        raise typer.Exit(1)
