"""A `torch.export` file (.pt2) as somebody else made it, turned into an ONNX graph without unpickling anything of it.

`torch.export.load` (torch 2.13) unpickles sample inputs, weights that say `use_pickle`, custom objects, and everything
in older files; it resolves operators by name from all of torch, and evaluates symbolic sizes as expressions. So the
archive is read here first: tensors must be plain bytes, operators ATen's, sizes harmless expressions. What passes is
written into a fresh archive in memory, without sample inputs and notes, and that one is loaded.
"""

import importlib.util
import io
import json
import logging
import math
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slim_scheduler.core.errors import InputError, first_line

MOST_BYTES = 2 << 30
MOST_JSON_BYTES = 64 << 20
MOST_ENTRIES = 20_000
OPSET = 20
OPEN_SIDE = 2  # of the example, where any batch size goes
MOST_INPUT_BYTES = 1 << 30

OPERATOR = re.compile(
    r"torch\.ops\.aten\.[a-z_][a-z0-9_]*\.[A-Za-z][A-Za-z0-9_]*|torch\.sym_[a-z_]+|"
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|getitem)"
)
FORBIDDEN_OPERATORS = ("torch.ops.aten.from_file.",)  # reads, or makes, a file
# A symbolic size: symbols, numbers, arithmetic and SymPy's names for it. No dot, no underscore, no other text. Powers,
# shifts, long numbers and long texts are no sizes: torch would calculate them without end.
EXPRESSION = re.compile(
    r"(?!.*(?:\*\*|<<|>>))(?=.{0,200}\Z)"
    r"(?:Symbol\('[su]\d{1,10}'|\b(?:[su]\d{1,10}|Integer|Rational|Add|Mul|Min|Max|Mod|FloorDiv|CleanDiv|PythonMod)\b|"
    r"\b(?:positive|nonnegative|integer|True|False|oo)\b|\b\d{1,10}\b|[-+*/(), <>=])*"
)
WEIGHT = re.compile(r"weight_\d+")
CONSTANT = re.compile(r"tensor_\d+")
TEXTS_TO_DROP = ("metadata", "guards_code")
DIALECTS = ("ATEN", "TRAINING")  # of torch.export; in the second, operators may work in place


def is_zip(head: bytes) -> bool:
    return head.startswith(b"PK\x03\x04")


def onnx_of_exported_program(path: Path) -> bytes:
    """The program as an ONNX file with any batch size where it allows that. Raises InputError, one line."""
    clean = _clean_archive(path)
    if importlib.util.find_spec("onnxscript") is None:  # the exporter would say so in a traceback
        raise InputError(f'{path.name}: .pt2 files need onnxscript; pip install "slim-scheduler[onnx]"')
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(clean)
            example = _example(path, program)
            _, named = program.call_spec.in_spec.children()
            program.example_inputs = ((), {named.context[0]: example}) if named.num_leaves else ((example,), {})
            made = torch.onnx.export(program, (), dynamo=True, opset_version=OPSET, verbose=False)
            assert made is not None, "without a file it returns the program"
            content: bytes = made.model_proto.SerializeToString()
    except InputError:
        raise
    except Exception as error:  # the loader and the exporter raise whatever they like
        raise _refuse(
            path,
            f"cannot be turned into an ONNX graph ({type(error).__name__}: {first_line(error)}); export it in "
            "evaluation mode, or to ONNX",
        ) from None
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
    return content


def _example(path: Path, program: torch.export.ExportedProgram) -> torch.Tensor:
    """An image batch of the shape that the program was exported with, of zeros."""
    names = program.graph_signature.user_inputs
    if len(names) != 1 or len(program.graph_signature.user_outputs) != 1:
        raise _refuse(
            path,
            f"has {len(names)} inputs and {len(program.graph_signature.user_outputs)} outputs; a network takes one "
            "image and gives one row of class scores",
        )
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == names[0])
    if not isinstance(value, torch.Tensor):
        raise _refuse(path, "its input is no tensor; a network takes one image")
    shape = [side if isinstance(side, int) else OPEN_SIDE for side in value.shape]
    if math.prod(shape) * value.dtype.itemsize > MOST_INPUT_BYTES:
        raise _refuse(path, f"its input is {'x'.join(map(str, shape))}, which is too large for an image batch")
    return torch.zeros(shape, dtype=value.dtype)


def _clean_archive(path: Path) -> io.BytesIO:
    """The archive with nothing in it but what was checked."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _checked(path, archive)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        raise _refuse(path, f"is damaged or truncated ({first_line(error)}); export or fetch it again") from None


def _checked(path: Path, archive: zipfile.ZipFile) -> io.BytesIO:
    entries = archive.infolist()
    if len(entries) > MOST_ENTRIES or sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise _refuse(path, f"holds more than {MOST_ENTRIES} entries or {MOST_BYTES} bytes; serve a smaller network")
    root, names = _root(path, [entry.filename for entry in entries])
    models = [name for name in names if name.startswith("models/")]
    if len(models) != 1 or not models[0].endswith(".json"):
        raise _refuse(path, f"holds {len(models)} programs; export one with torch.export.save")
    model = models[0].removeprefix("models/").removesuffix(".json")

    def text(name: str) -> Any:
        entry = archive.getinfo(f"{root}/{name}")
        if entry.file_size > MOST_JSON_BYTES:
            raise _refuse(path, f"{name} has {entry.file_size} bytes, at most {MOST_JSON_BYTES} are read")
        return json.loads(archive.read(entry))

    program = _stripped(text(models[0]))
    _check_program(path, program)
    kept: dict[str, bytes] = {models[0]: json.dumps(program).encode()}
    for kind, pattern in (("weights", WEIGHT), ("constants", CONSTANT)):
        config = f"data/{kind}/{model}_{kind}_config.json"
        if config not in names:
            raise _refuse(path, f"has no {config}: it is of an older torch, or no torch.export file; export it again")
        listed = text(config)
        for payload in listed["config"].values():
            file = payload["path_name"]
            if payload["use_pickle"] is not False or not pattern.fullmatch(file):
                raise _refuse(
                    path, f"holds a pickle ({file!r}), which is never loaded; export it with plain tensors, or to ONNX"
                )
            _check_tensor(path, archive.getinfo(f"{root}/data/{kind}/{file}").file_size, payload, file)
            kept[f"data/{kind}/{file}"] = b""
        kept[config] = json.dumps(listed).encode()
    nothing = io.BytesIO()
    torch.save(((), {}), nothing)
    kept[f"data/sample_inputs/{model}.pt"] = nothing.getvalue()
    for name in ("archive_format", "archive_version", "byteorder", ".data/version"):
        if name in names:
            kept[name] = b""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as clean:
        for name, content in kept.items():
            clean.writestr(f"{model}/{name}", content or archive.read(f"{root}/{name}"))
    out.seek(0)
    return out


def _root(path: Path, names: list[str]) -> tuple[str, set[str]]:
    roots = {name.partition("/")[0] for name in names}
    root = next(iter(roots)) if len(roots) == 1 else ""
    inside = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inside or "data.pkl" in inside:
        what = "TorchScript" if "constants.pkl" in inside else "a pickle of torch.save"
        raise _refuse(
            path, f"is {what}, which is never loaded; export the network to ONNX, or with torch.export.save (.pt2)"
        )
    if not root or len(inside) != len(names) or not any(name.startswith("models/") for name in inside):
        raise _refuse(path, "is a zip archive but no torch.export file; export the network with torch.export.save")
    return root, inside


def _stripped(tree: Any) -> Any:
    """The program without notes that would be read as code or names and that running it does not need."""
    if isinstance(tree, dict):
        return {
            key: ([] if isinstance(value, list) else {}) if key in TEXTS_TO_DROP else _stripped(value)
            for key, value in tree.items()
        }
    return [_stripped(value) for value in tree] if isinstance(tree, list) else tree


def _check_program(path: Path, program: Any) -> None:
    for key, value in _texts(program, ""):
        if (
            key == "target"
            and value.startswith("torch") | value.startswith("_operator")
            and (not OPERATOR.fullmatch(value) or value.startswith(FORBIDDEN_OPERATORS))
        ):
            raise _refuse(
                path, f"needs the operator {value[:80]!r}; export it so that it has standard ATen operators alone"
            )
        if key == "expr_str" and not EXPRESSION.fullmatch(value):
            raise _refuse(path, f"has the size {value[:80]!r}, which is no arithmetic of sizes; export it again")
    for node in program["graph_module"]["graph"]["nodes"]:
        if not OPERATOR.fullmatch(node["target"]):
            raise _refuse(
                path,
                f"needs the operator {node['target'][:80]!r}; export it so that it has standard ATen operators alone",
            )
    if not set(program.get("verifiers", ())) <= set(DIALECTS):
        raise _refuse(path, f"is in the dialect {str(program['verifiers'])[:80]}; export it with torch.export.export")
    for name in program["range_constraints"]:
        if not EXPRESSION.fullmatch(name):
            raise _refuse(path, f"bounds the size {name[:80]!r}, which is no size; export it again")


def _texts(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text with the key that it stands under."""
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _texts(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value, key)


def _check_tensor(path: Path, stored: int, payload: Any, file: str) -> None:
    """A tensor must lie within the bytes that are stored for it."""
    meta = payload["tensor_meta"]
    sizes, strides = ([side["as_int"] for side in meta[name]] for name in ("sizes", "strides"))
    offset = meta["storage_offset"]["as_int"]
    numbers = (*sizes, *strides, offset)
    if not all(isinstance(number, int) and 0 <= number <= MOST_BYTES for number in numbers):
        raise _refuse(path, f"tensor {file!r} has an impossible size; export or fetch it again")
    needed = (
        0 if 0 in sizes else offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    )
    if needed > stored:  # in elements of a byte or more: what is longer cannot fit
        raise _refuse(path, f"tensor {file!r} declares {needed} numbers and {stored} bytes are stored; it is truncated")
    if meta["device"]["type"] != "cpu":
        raise _refuse(path, f"tensor {file!r} lies on {meta['device']['type']!r}; export it from the CPU")


def _refuse(path: Path, why: str) -> InputError:
    return InputError(f"{path.name}: {why}")
