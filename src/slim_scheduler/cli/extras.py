"""Which optional packages a command needs, and what to say where one is missing.

`pip install slim-scheduler` leaves out what only some commands use; `pyproject.toml` has the extras' requirements.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

# Extra -> the modules that its packages bring.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "uvloop", "httptools", "starlette", "prometheus_client", "grpc", "tritonclient", "google.protobuf"
    ),
    "train": ("gymnasium", "tensorboard"),
    "ray": ("ray",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "openvino": ("openvino", "onnx", "onnxruntime"),
}  # fmt: skip
# What of a command needs an extra; the rest of it, and every other command, runs without.
NEEDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "serve": (("serve", ""), ("ray", "cluster.address"), ("openvino", "device openvino:CPU")),
    "load": (("serve", ""),),
    "bench": (("ray", "cluster.address"), ("openvino", "device openvino:CPU")),
    "measure": (("openvino", "--device openvino:CPU"),),
    "fit": (("onnx", "--teacher with an ONNX file"),),
    "import": (("onnx", ""),),
    "export": (("onnx", ""),),
}


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if not _installed(module)]


def lacking() -> Iterator[tuple[str, str, list[str], str]]:
    """(command, what of it, missing modules, extra) for all that cannot run here; an empty `what` is all of it."""
    for command, needs in NEEDS.items():
        for extra, what in needs:
            modules = missing(extra)
            if modules:
                yield command, what, modules, extra


def sentence(command: str, module: str) -> str:
    """What a command says where a module is missing."""
    top = module.partition(".")[0]
    extra = next((name for name, modules in EXTRAS.items() if top in [m.partition(".")[0] for m in modules]), None)
    install = f'pip install "slim-scheduler[{extra}]"' if extra else f"pip install {top}"
    return f"{command} needs {top}, which is not installed; {install}"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False
