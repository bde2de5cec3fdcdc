"""The models that are served: loaded by name from one folder, swapped without losing a request.

A swap starts the new engine beside the old one, then points to it, then lets the old one finish what it holds; a
folder or policy that does not load leaves the old one as it is. Names come from requests, so they are checked against
what the folder holds and never become a path of their own.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slim_scheduler.core.accuracy import AccuracyTable
from slim_scheduler.core.errors import DataError, InputError
from slim_scheduler.core.types import ServerName
from slim_scheduler.engine.work_thread import in_work_thread
from slim_scheduler.serve.metadata import VERSION, Layout, ModelCard, card_of
from slim_scheduler.serve.observer import Observer
from slim_scheduler.serve.refusal import Kind, Refusal, invalid, quote
from slim_scheduler.setup.accuracy_files import accuracy_path, read_accuracy
from slim_scheduler.setup.config import Config, ModelConfig
from slim_scheduler.setup.machines import load_shape
from slim_scheduler.setup.model_names import NAME, model_folder, model_name
from slim_scheduler.setup.routers import parse_router

if TYPE_CHECKING:
    from slim_scheduler.engine.engine import SlimEngine

log = logging.getLogger(__name__)

MOST_SETS = 1024  # of servers whose precision is remembered


Build = Callable[[Config, Observer], "SlimEngine"]
Counts = dict[str, dict[str, int]]


class Served:
    """One loaded model: its card, its engine, and engines of before that still finish their requests."""

    def __init__(self, card: ModelCard, config: Config, engine: "SlimEngine", observer: Observer) -> None:
        self.card = card
        self.config = config
        self.engine = engine
        self.observer = observer
        self.accuracy = _accuracy(engine.config)
        self.finishing: list[SlimEngine] = []
        self._past: Counts = {}
        self._precisions_of: Config | None = None
        self._precisions: dict[frozenset[ServerName], str] = {}

    def counts(self) -> Counts:
        """Totals of requests and items by outcome, over all engines of this model."""
        total = {unit: dict(row) for unit, row in self._past.items()}
        for engine in (self.engine, *self.finishing):
            _add(total, engine.counts)
        return total

    def precision(self, servers: frozenset[ServerName]) -> str:
        """What these servers compute in; several are joined with a plus."""
        config = self.engine.config
        if config is not self._precisions_of or len(self._precisions) > MOST_SETS:
            self._precisions_of = config
            self._precisions = {}
        found = self._precisions.get(servers)
        if found is None:
            by_name = {server.name: server.precision for server in config.servers}
            found = "+".join(sorted({by_name.get(name, "fp32") for name in servers}))
            self._precisions[servers] = found
        return found

    def point_to(self, engine: "SlimEngine", config: Config, card: ModelCard) -> "SlimEngine":
        """Serves new requests with another engine; returns the old one, which must be retired."""
        old, self.engine, self.config, self.card = self.engine, engine, config, card
        self.accuracy = _accuracy(engine.config)
        self.finishing.append(old)
        return old

    async def retire(self, old: "SlimEngine", grace_s: float) -> None:
        """Lets an old engine finish what it has, for up to `grace_s`."""
        await old.stop(grace_s)
        _add(self._past, old.counts)
        self.finishing.remove(old)


class Repository:
    """All models of one folder. `build` makes an engine for a configuration, not yet started.

    Raises CheckpointError for a folder whose name cannot be a model's.
    """

    def __init__(self, config: Config, build: Build, layout: Layout = "NCHW", max_items: int = 4096) -> None:
        model = model_folder(config.model.path)
        self.folder = model.parent
        self.policies = _policy_folder(config)
        self.served: dict[str, Served] = {}
        self.reasons: dict[str, str] = {}
        self.first = model_name(model)
        self._config = config
        self._build = build
        self._layout: Layout = layout
        self._max_items = max_items
        self._changing = asyncio.Lock()
        self._stopping: dict[asyncio.Task[None], SlimEngine] = {}  # what ends an engine, whoever waits for it
        self._closed = False

    def check_first(self) -> None:
        """Raises CheckpointError, with the path, when the configured model is not there."""
        load_shape(self._config)

    def find(self, name: str, version: str = "") -> Served:
        """A loaded model. Raises Refusal: 404 for an unknown name or version, 503 while it is not loaded."""
        served = self.served.get(name)
        if served is None:
            if name in self.names():
                raise Refusal(Kind.UNAVAILABLE, f"model {quote(name)} is not loaded", 1.0)
            known = ", ".join(self.served) or "none"
            raise Refusal(Kind.NOT_FOUND, f"model {quote(name)} does not exist; loaded: {known}")
        if version and version != VERSION:
            raise Refusal(Kind.NOT_FOUND, f"version {quote(version)} of {name} does not exist; available: {VERSION}")
        return served

    def names(self) -> list[str]:
        """The folder's models, loaded or not."""
        return sorted(
            path.parent.name for path in self.folder.glob("*/manifest.json") if NAME.fullmatch(path.parent.name)
        )

    def index(self) -> list[dict[str, str]]:
        """The repository index of the protocol."""
        rows = []
        for name in self.names():
            row = {"name": name, "version": VERSION, "state": "READY" if name in self.served else "UNAVAILABLE"}
            row["reason"] = self.reasons.get(name, "" if name in self.served else "not loaded")
            rows.append(row)
        return rows

    async def load(self, name: str, grace_s: float = 30.0) -> None:
        """Loads a model, or loads it again from its folder. Raises Refusal and keeps what was served when it cannot."""
        if name not in self.names():
            raise Refusal(Kind.NOT_FOUND, f"model {quote(name)} is not in the model folder; there: {self._there()}")

        def again(served: Served | None) -> Config:
            router = self._config.router if served is None else served.config.router
            model = ModelConfig(path=str(self.folder / name))
            return msgspec.structs.replace(self._config, model=model, router=router)

        await self._change(name, again, grace_s)

    async def set_router(self, name: str, router: str, grace_s: float = 30.0) -> None:
        """Another policy for a loaded model, by name. Raises Refusal and keeps the old one when it cannot be used."""
        try:
            parsed = parse_router(router)
        except InputError as error:
            raise invalid(quote(error, 300)) from None
        if parsed.kind == "ppo":
            router = f"ppo:{self._policy(str(parsed.argument))}"
        elif parsed.needs_files:
            raise invalid(f"router {quote(router)} is for the command line alone; give ppo:NAME, or one without a file")

        def routed(_: Served | None) -> Config:
            config = self.find(name).config
            return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, name=router))

        self.find(name)
        await self._change(name, routed, grace_s)

    def _policy(self, name: str) -> Path:
        """A policy's folder by its name, which is never a path. Raises Refusal."""
        if not NAME.fullmatch(name) or not (self.policies / name).is_dir():
            there = ", ".join(sorted(p.name for p in self.policies.glob("*") if p.is_dir())) or "none"
            raise Refusal(Kind.NOT_FOUND, f"policy {quote(name)} does not exist; available: {there}")
        return self.policies / name

    async def unload(self, name: str, grace_s: float = 30.0) -> None:
        """Stops serving a model after the requests it has. Raises Refusal when it is not loaded."""
        async with self._changing:
            served = self.served.pop(name, None)
        if served is None:
            raise Refusal(
                Kind.NOT_FOUND, f"model {quote(name)} is not loaded; loaded: {', '.join(self.served) or 'none'}"
            )
        await asyncio.shield(self._end(served.engine, served.engine.stop(grace_s)))

    async def close(self, grace_s: float) -> None:
        """Stops every engine within the grace time, also those that are being stopped with more. A model that is still
        being loaded then is not waited for."""
        self._closed = True
        served, self.served = self.served, {}
        for one in served.values():
            self._end(one.engine, one.engine.stop(grace_s))
        for engine in self._stopping.values():
            engine.hurry(grace_s)
        await asyncio.gather(*self._stopping)

    def _end(self, engine: "SlimEngine", ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(ending)
        self._stopping[task] = engine
        task.add_done_callback(self._stopping.pop)
        return task

    async def _change(self, name: str, change: Callable[[Served | None], Config], grace_s: float) -> None:
        """`change` says what to serve instead of what is served when its turn has come. Raises Refusal."""
        async with self._changing:
            if self._closed:
                raise Refusal(Kind.UNAVAILABLE, "the server is stopping", 1.0)
            served = self.served.get(name)
            config = change(served)
            observer = served.observer if served else Observer()
            try:
                card = read_card(Path(config.model.path), self._layout, self._max_items)
                # Reads weights and builds slices: too long for the event loop that answers requests.
                engine = await in_work_thread(f"slim-load-{name}", partial(self._build, config, observer))
                await engine.start()
            except Exception as error:  # whatever is wrong with a file, what was served before goes on
                self.reasons[name] = quote(error, 300)
                kept = "was not changed" if served else f"cannot be served with router {config.router.name}"
                if self.served:  # a start ends with the reason itself
                    log.warning("model %s %s: %s", name, kept, error)
                raise invalid(f"{name} {kept}: {quote(error, 300)}") from error
            if self._closed:
                await engine.stop(0.0)
                raise Refusal(Kind.UNAVAILABLE, "the server is stopping", 1.0)
            self.reasons.pop(name, None)
            log.info("model %s now serves with router %s", name, config.router.name)
            if served is None:
                self.served[name] = Served(card, config, engine, observer)
                return
            old = served.point_to(engine, config, card)
            self._end(old, served.retire(old, grace_s))

    def _there(self) -> str:
        return ", ".join(self.names()) or "none"


def read_card(folder: Path, layout: Layout, max_items: int) -> ModelCard:
    """A model's card from its manifest. Raises CheckpointError."""
    shape = load_shape(Config(model=ModelConfig(path=str(folder))))
    about = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=_About)
    card = card_of(shape, about.classes if len(about.classes) == shape.classes else (), layout, max_items)
    return msgspec.structs.replace(card, name=folder.name, mean=about.mean, std=about.std)


class _About(msgspec.Struct):
    """What a manifest tells clients beside the shape."""

    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def _accuracy(config: Config) -> AccuracyTable | None:
    """What the model's widths are expected to get right; None where nobody measured it."""
    try:
        return read_accuracy(accuracy_path(config))
    except DataError:
        return None


def _policy_folder(config: Config) -> Path:
    router = parse_router(config.router.name)
    return router.argument.parent if router.kind == "ppo" else Path("policies")


def _add(total: Counts, more: Counts) -> None:
    for unit, row in more.items():
        into = total.setdefault(unit, {})
        for key, count in row.items():
            into[key] = into.get(key, 0) + count
