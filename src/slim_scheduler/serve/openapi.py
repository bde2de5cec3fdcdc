"""The server's OpenAPI document, made from the models it serves: exact paths, shapes and widths.

It describes the public listener's JSON side. The binary tensor extension is described in words, because a schema
cannot say that lengths in the JSON count bytes after it.
"""

from typing import Any

from slim_scheduler.serve.decode import LARGEST_INPUT, LONGEST_ID
from slim_scheduler.serve.metadata import INPUT, OUTPUT, PLATFORM, VERSION, ModelCard
from slim_scheduler.serve.parameters import LOWEST_PRIORITY
from slim_scheduler.serve.repository import Served

INFER_TEXT = """Runs the model on one or more images.

Binary tensors: put `binary_data_size` into an input's parameters instead of `data`, append the bytes to the JSON, and
send `Inference-Header-Content-Length` with the length of the JSON. Length 0 means that the body is one FP32 tensor.
Outputs come back so with `binary_data`, or `binary_data_output` for all. Bodies may be compressed with gzip or deflate.

More request parameters: `deadline_ms` (above 0; what is not done by then is refused with 503), `timeout` (the same in
microseconds), `accuracy_floor` (0 to 1; one that nothing reaches is refused with 400), `widths` (one per segment,
comma-separated, instead of `width`).

`confidence_floor` (0 to 1): an item whose answer is less sure runs again at the widest. With a deadline the first
answer is given where the second does not come in time, or would not, unless `anytime` is false. The response says
`confidence` and `passes`; a model without measured confidence refuses the floor with 400."""

Schema = dict[str, Any]
# Parameters that nobody here knows are ignored, if they are of a kind that the protocol has.
PARAMETER: Schema = {"type": ["string", "number", "boolean", "null", "array"], "items": {"type": "number"}}
MOST_LABELS = 2**31


def document(served: list[Served], version: str) -> Schema:
    """The whole document for the models served now."""
    paths: Schema = {
        "/v2": {"get": _get("Server metadata", "ServerMetadata")},
        "/v2/health/live": {"get": _get("Whether the process answers", "Live")},
        "/v2/health/ready": {"get": _get("Whether an inference would be served", "Ready", busy=True)},
        "/v2/models": {"get": _get("Names of loaded models", "ModelNames")},
        "/v2/models/stats": {"get": _get("Statistics of all models", "Statistics")},
        "/v2/repository/index": {"post": _index()},
        "/metrics": {"get": _text("Prometheus metrics")},
    }
    schemas = dict(SCHEMAS)
    for one in served:
        card = one.card
        calibrated = one.accuracy is not None and one.accuracy.calibration is not None
        schemas[f"Infer_{card.name}"] = _infer_schema(card, calibrated)
        for prefix, parameters in _prefixes(card):
            paths[prefix] = _with(parameters, get=_get("Model metadata", "ModelMetadata", unknown=True))
            paths[prefix + "/ready"] = _with(parameters, get=_get("Whether the model is servable", "Ready", True, True))
            paths[prefix + "/config"] = _with(parameters, get=_get("Model configuration", "Anything", unknown=True))
            paths[prefix + "/stats"] = _with(parameters, get=_get("Model statistics", "Statistics", unknown=True))
            paths[prefix + "/infer"] = _with(parameters, post=_infer(card))
    return {
        "openapi": "3.1.0",
        "info": {"title": PLATFORM, "version": version, "description": "Open Inference Protocol v2"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _prefixes(card: ModelCard) -> list[tuple[str, list[Schema]]]:
    version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "enum": [VERSION]}}
    path = f"/v2/models/{card.name}"
    return [(path, []), (path + "/versions/{version}", [version])]


def _with(parameters: list[Schema], **operations: Schema) -> Schema:
    return {"parameters": parameters, **operations} if parameters else dict(operations)


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(text: str, schema: str) -> Schema:
    return {"description": text, "content": {"application/json": {"schema": _ref(schema)}}}


def _get(text: str, schema: str, busy: bool = False, unknown: bool = False) -> Schema:
    responses = {"200": _json("OK", schema), **ERRORS}
    if busy:
        responses["503"] = _json("Not ready", "NotReady")
    if unknown:
        responses["404"] = _json("No such model or version", "Error")
    return {"summary": text, "responses": responses}


def _text(text: str) -> Schema:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"summary": text, "responses": {"200": {"description": "OK", "content": content}, **ERRORS}}


def _index() -> Schema:
    responses = {"200": _json("Models of the folder", "Index"), **ERRORS, "413": _json("Too large", "Error")}
    body = {"content": {"application/json": {"schema": _ref("IndexWish")}}}
    return {"summary": "Repository index", "requestBody": body, "responses": responses}


def _infer(card: ModelCard) -> Schema:
    answer = _json("The answer; JSON with bytes after it where binary outputs were asked for", "InferResponse")
    answer["content"]["application/octet-stream"] = {"schema": {}}
    responses = {
        "200": answer,
        **ERRORS,
        "404": _json("No such model or version", "Error"),
        "413": _json("Over a size limit", "Error"),
        "503": _json("Overloaded, stopping, or not done by the deadline; see Retry-After", "Error"),
    }
    body = {"required": True, "content": {"application/json": {"schema": _ref(f"Infer_{card.name}")}}}
    return {"summary": "Inference", "description": INFER_TEXT, "requestBody": body, "responses": responses}


def _infer_schema(card: ModelCard, calibrated: bool) -> Schema:
    def tensor(datatype: str, number: Schema) -> Schema:
        elements = card.item_elements
        shape = [1, *card.item_shape]
        return {
            "type": "object",
            "required": ["name", "shape", "datatype", "data"],
            "properties": {
                "name": {"const": INPUT},
                "datatype": {"const": datatype},
                "shape": {"const": shape, "description": "the first is the number of items"},
                "data": {"type": "array", "items": number, "minItems": elements, "maxItems": elements},
            },
        }

    parameters: Schema = {
        "binary_data_output": {"type": "boolean"},
        "width": {"enum": [*card.widths, None]},
        "priority": {"type": ["integer", "null"], "minimum": 0, "maximum": LOWEST_PRIORITY},
        "unmet": {"enum": ["refuse", "answer"]},
        "timeline": {"type": "boolean"},
        "anytime": {"type": "boolean"},
    }
    if calibrated:
        parameters["confidence_floor"] = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
    wished: Schema = {
        "binary_data": {"type": "boolean"},
        "classification": {"type": "integer", "minimum": 0, "maximum": MOST_LABELS},
    }

    def output(form: Schema) -> Schema:
        fields = {"type": ["object", "null"], "additionalProperties": False, "properties": wished, **form}
        return {"type": "object", "required": ["name"], "properties": {"name": {"const": OUTPUT}, "parameters": fields}}

    logits: Schema = {"properties": wished | {"classification": {"const": 0}}}
    labels: Schema = {"type": "object", "required": ["classification"]}
    labels["properties"] = wished | {"classification": {"type": "integer", "minimum": 1, "maximum": MOST_LABELS}}
    outputs = [
        {"type": "null"},
        {"type": "array", "maxItems": 1, "items": output({})},
        {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "prefixItems": [output(logits), {**output(labels), "required": ["name", "parameters"]}],
        },
    ]
    tensors = [
        tensor("FP32", {"type": "number", "minimum": -LARGEST_INPUT, "maximum": LARGEST_INPUT}),
        tensor("UINT8", {"type": "integer", "minimum": 0, "maximum": 255}),
    ]
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": ["string", "null"], "maxLength": LONGEST_ID},
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": tensors}},
            "outputs": {"anyOf": outputs, "description": "logits, labels, or both, once each"},
            "parameters": {"type": ["object", "null"], "additionalProperties": False, "properties": parameters},
        },
    }


def _error(text: str) -> Schema:
    return _json(text, "Error")


ERRORS: Schema = {
    "400": _error("Invalid"),
    "401": _error("No token, or a wrong one"),
    "403": _error("Host or Origin not served"),
    "405": _error("No such method"),
    "408": _error("Sent too slowly"),
    "431": _error("The head is too long"),
}
_STRINGS: Schema = {"type": "array", "items": {"type": "string"}}
_TENSORS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
        },
    },
}


def _object(required: list[str], properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


SCHEMAS: Schema = {
    "Error": _object(["error"], {"error": {"type": "string"}}),
    "Anything": {"type": "object"},
    "Live": _object(["live"], {"live": {"type": "boolean"}}),
    "Ready": _object(["ready"], {"ready": {"type": "boolean"}}),
    "NotReady": _object(["ready", "error"], {"ready": {"const": False}, "error": {"type": "string"}}),
    "ServerMetadata": _object(
        ["name", "version", "extensions"],
        {"name": {"type": "string"}, "version": {"type": "string"}, "extensions": _STRINGS},
    ),
    "ModelNames": _object(["models"], {"models": _STRINGS}),
    "ModelMetadata": _object(
        ["name", "versions", "platform", "inputs", "outputs"],
        {
            "name": {"type": "string"},
            "versions": _STRINGS,
            "platform": {"type": "string"},
            "inputs": _TENSORS,
            "outputs": _TENSORS,
            "parameters": {"type": "object", "description": "class names, datatypes, mean and std of the pixels"},
        },
    ),
    "Statistics": _object(["model_stats"], {"model_stats": {"type": "array", "items": {"type": "object"}}}),
    "IndexWish": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
    "Index": {
        "type": "array",
        "items": _object(
            ["name", "version", "state", "reason"],
            {key: {"type": "string"} for key in ("name", "version", "state", "reason")},
        ),
    },
    "InferResponse": _object(
        ["model_name", "model_version", "outputs"],
        {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": {
                "type": "array",
                "items": _object(
                    ["name", "shape", "datatype"],
                    {
                        "name": {"type": "string"},
                        "shape": {"type": "array", "items": {"type": "integer"}},
                        "datatype": {"enum": ["FP32", "BYTES"]},
                        "data": {"type": "array"},
                    },
                ),
            },
        },
    ),
}
