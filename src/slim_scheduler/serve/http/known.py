"""What was read before need not be read again: heads of requests, and JSON parts of their bodies, byte for byte.

Clients send the same head and the same JSON with every image. A head that has passed the parser, the guard and the
route, and was answered, means the same when the same bytes come again; so does a JSON part. Both memories are bounded,
and forget everything when full.
"""

import msgspec

from slim_scheduler.serve.parameters import Asked, OutputForm

LONGEST_HEAD = 2048
LONGEST_JSON = 512
MOST = 1024  # of each, per listener and per model

HeaderMap = dict[bytes, bytes]


class InferHead(msgspec.Struct, frozen=True):
    """The meaning of an infer request's head: which model, how many bytes follow, and how many of them are JSON."""

    name: str
    version: str
    length: int
    json_length: int | None
    headers: HeaderMap


class KnownHeads:
    """Heads of infer requests, from the request line to the empty line."""

    def __init__(self) -> None:
        self._heads: dict[bytes, InferHead] = {}

    def find(self, data: bytes) -> tuple[InferHead, int] | None:
        """The head that `data` begins with and where the body begins, if `data` is one whole request and no more."""
        end = data.find(b"\r\n\r\n", 0, LONGEST_HEAD)
        if end < 0:
            return None
        begin = end + 4
        head = self._heads.get(data[:begin])
        if head is None or len(data) - begin != head.length:
            return None
        return head, begin

    def learn(self, raw: bytes, head: InferHead) -> None:
        """Keeps a head whose request was answered. The caller vouches that nothing but these bytes decided about it."""
        if len(self._heads) >= MOST:
            self._heads.clear()
        self._heads[raw] = head


class Template(msgspec.Struct, frozen=True):
    """The meaning of a JSON part that is followed by one binary tensor and nothing else."""

    datatype: str
    shape: list[int]
    asked: Asked
    outputs: tuple[OutputForm, ...]
    items: int


class Templates:
    """JSON parts of one model's requests."""

    def __init__(self) -> None:
        self._templates: dict[bytes, Template] = {}

    def find(self, text: bytes) -> Template | None:
        return self._templates.get(text)

    def learn(self, text: bytes, template: Template) -> None:
        """Keeps a JSON part of at most `LONGEST_JSON` bytes without an id, which is another one every time."""
        if len(self._templates) >= MOST:
            self._templates.clear()
        self._templates[text] = template
