"""Trains a slimmable network: sandwich rule, in-place distillation, an independent random width per segment.

`fit` is what `slim fit` calls. It owns the loop and its schedule; images come from `data`, batches from `Batches`,
updates from `MuonSgd`. Test images are never looked at: curves come from held-out training images.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from slim_scheduler.core.errors import CheckpointError, InputError
from slim_scheduler.model import checkpoint
from slim_scheduler.model.batches import Batches
from slim_scheduler.model.data import channel_statistics, held_out, load_data
from slim_scheduler.model.design import preset_for
from slim_scheduler.model.images import ImageData
from slim_scheduler.model.optimizer import MuonSgd
from slim_scheduler.model.presets import Preset, Recipe
from slim_scheduler.model.sandwich import backward, width_tuples
from slim_scheduler.model.slim_resnet import SlimResNet
from slim_scheduler.model.teacher import Teacher, load_teacher
from slim_scheduler.model.training_state import EpochRecord, RunState, read_state, write_state
from slim_scheduler.model.workers import Workers
from slim_scheduler.setup.interruption import deferred
from slim_scheduler.setup.model_names import model_name

VALIDATION_BATCH = 250
VALIDATION_ITEMS = 1000  # per point of the curve: a standard error of 1.5 points, and seconds on a CPU
STATE_FILE = "training.safetensors"


@dataclass(frozen=True, slots=True)
class FitProgress:
    """What the progress callback gets after every step. `share` of the run in [0, 1]; loss of the widest net."""

    step: int
    share: float
    epoch: float
    loss: float
    image_size: int
    seconds: float
    history: tuple[EpochRecord, ...]


@dataclass(frozen=True, slots=True)
class FitResult:
    """The finished network's folder and its curve."""

    model: SlimResNet
    out: Path
    history: tuple[EpochRecord, ...]
    seconds: float


def fit(
    preset: str | Preset | None,
    data: str | Path,
    out: str | Path,
    *,
    channels: Sequence[int] = (),
    segments: int | None = None,
    blocks: Sequence[int] = (),
    size: tuple[int, int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    epochs: int | None = None,
    minutes: float | None = None,
    workers: int | None = None,
    start: str | Path | None = None,
    teacher: str | Path | None = None,
    save_every: float = 180.0,
    progress: Callable[[FitProgress], None] | None = None,
) -> FitResult:
    """Trains, and writes the checkpoint to `out`; resumes an interrupted run found there.

    A preset's name, or `channels`, `segments` and `blocks` (`design.py`), give a network for the classes and the shape
    of the data; a `Preset` is taken as it is. `size` is the (height, width) that class folders are resized to.

    `epochs` replaces the recipe's. `minutes` makes the schedule follow the clock instead (ends on time, but two runs
    differ). `workers` split each batch (default: one per compute thread on a CPU, one on a GPU); another number gives
    the same gradients up to rounding. The state is written every `save_every` seconds and at an interruption.
    `start` is a finished network of the same architecture to train further, with the whole schedule once more (a warm
    restart, Loshchilov and Hutter 2017). `teacher` is a folder with a stronger network (`model.teacher`), whose
    answers to the same augmented images are learnt from as the recipe's `teacher_*` say. Raises InputError and below.
    """
    check_device(device)
    model_name(out)
    images = load_data(data, preset.architecture.item_shape if isinstance(preset, Preset) else None, size)
    if not isinstance(preset, Preset):
        preset = preset_for(images, preset, channels, segments, blocks)
    if epochs is not None:
        if epochs < 1:
            raise InputError(f"epochs {epochs} must be at least 1")
        preset = msgspec.structs.replace(preset, recipe=msgspec.structs.replace(preset.recipe, epochs=epochs))
    if minutes is not None and not minutes > 0:
        raise InputError(f"minutes {minutes:g} must be more than 0")
    run = _Run(preset, images, Path(out), seed, torch.device(device), minutes, workers, start, teacher)
    run.train(save_every, progress or (lambda _: None))
    return run.finish()


def check_device(device: str) -> None:
    """Raises InputError for one that is not there, or that cannot train."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise InputError(f"device {device} cannot train; give cpu or cuda:N")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= available:
        raise InputError(f"device {device} is not there: torch {torch.__version__} sees {available} GPUs; use cpu")


class _Run:
    """One training run: the network, its average, the optimiser and where it stands."""

    def __init__(
        self,
        preset: Preset,
        data: ImageData,
        out: Path,
        seed: int,
        device: torch.device,
        minutes: float | None = None,
        workers: int | None = None,
        start: str | Path | None = None,
        teacher: str | Path | None = None,
    ) -> None:
        self.preset, self.recipe, self.out, self.seed, self.device = preset, preset.recipe, out, seed, device
        self.minutes = minutes
        self.workers = Workers(workers or (torch.get_num_threads() if device.type == "cpu" else 1))
        self.data = data
        if len(self.data.classes) != preset.architecture.classes:
            raise InputError(
                f"data {self.data.name} has {len(self.data.classes)} classes, preset {preset.name} "
                f"{preset.architecture.classes}; give a preset by its name, which is fitted to the data"
            )
        self.teacher = self._teacher(Path(teacher)) if teacher is not None else None
        train, validation = held_out(self.data.train, self.recipe.held_out, seed)
        self.statistics = channel_statistics(train)
        self.validation = validation.take(np.arange(len(validation))[:: max(1, len(validation) // VALIDATION_ITEMS)])
        self.batches = Batches(train, self.recipe, self.statistics, preset.architecture.item_shape[1], seed, device)
        if self.batches.per_epoch < 1:
            raise InputError(
                f"data {self.data.name} has {len(train)} training images, fewer than one batch of {self.recipe.batch}"
            )
        torch.manual_seed(seed)
        self.model = SlimResNet(preset.architecture, out.resolve().name).to(device)
        self.before = self._start_from(Path(start)) if start is not None else None
        parameters = list(self.model.named_parameters())
        matrices = [(n, p) for n, p in parameters if p.dim() == 4 and "stem" not in n]
        others = [(n, p) for n, p in parameters if p.dim() != 4 or "stem" in n]
        self.optimizer = MuonSgd(
            matrices,
            others,
            muon_lr=self.recipe.muon_lr,
            sgd_lr=self.recipe.sgd_lr,
            momentum=self.recipe.momentum,
            weight_decay=self.recipe.weight_decay,
        )
        self.average = {n: p.detach().clone() for n, p in parameters} if self.recipe.ema_decay else {}
        self.state = RunState(identity=self._identity(train.labels))
        self.state_path = out / ".training" / STATE_FILE

    def _start_from(self, folder: Path) -> checkpoint.Manifest:
        """Takes over a finished network's weights."""
        manifest = checkpoint.load_manifest(folder)
        model = checkpoint.load(folder, str(self.device))
        if not isinstance(model, SlimResNet) or model.arch != self.preset.architecture:
            raise InputError(
                f"{folder} has another architecture than preset {self.preset.name}; start from a network of that preset"
            )
        self.model.load_state_dict(model.state_dict())
        return manifest

    def _teacher(self, folder: Path) -> Teacher:
        teacher = load_teacher(folder, str(self.device))
        teacher.check(self.data.classes, self.preset.architecture.item_shape)
        return teacher

    def _ask(self, images: Tensor) -> Tensor:
        assert self.teacher is not None
        return self.teacher.logits(images, *self.statistics)

    def _identity(self, labels: np.ndarray) -> str:
        import hashlib

        start = (self.before.weights_sha256,) if self.before else ()
        teacher = (self.teacher.record.sha256,) if self.teacher else ()
        content = msgspec.json.encode((self.preset, self.seed, self.data.name, labels.tolist(), start, teacher))
        return f"{self.preset.name}-seed{self.seed}-{hashlib.sha256(content).hexdigest()[:12]}"

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name."""
        return {
            **{f"model.{n}": p for n, p in self.model.named_parameters()},
            **{f"momentum.{n}": v for n, v in self.optimizer.state.items()},
            **{f"average.{n}": v for n, v in self.average.items()},
        }

    def train(self, save_every: float, report: Callable[[FitProgress], None]) -> None:
        begun = read_state(self.state_path, self.state.identity, self._tensors())
        if begun is None and (self.out / checkpoint.MANIFEST).exists():
            raise CheckpointError(f"{self.out} holds a finished network; choose another --out, or remove it")
        self.state = begun or self.state
        started = time.monotonic() - self.state.seconds
        saved = time.monotonic()
        losses: list[float] = []
        with deferred() as interruption, self.workers:
            while (share := self._share()) < 1.0:
                loss = self._step(share)
                losses.append(loss)
                self.state.step += 1
                self.state.seconds = time.monotonic() - started
                if self.state.step % self.batches.per_epoch == 0 or self._share() >= 1.0:
                    self._validate(float(np.mean(losses)), share)
                    losses.clear()
                try:
                    report(self._progress(loss, share))
                    interruption.check()
                except BaseException:
                    self._save()
                    raise
                if time.monotonic() - saved >= save_every:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def _save(self) -> None:
        write_state(self.state_path, self.state, self._tensors())
        (self.state_path.parent / ".gitignore").write_text("*\n")

    def _share(self) -> float:
        """How much of the run is done, in [0, 1]."""
        if self.minutes is not None:
            return min(1.0, self.state.seconds / (60.0 * self.minutes))
        return self.state.step / (self.recipe.epochs * self.batches.per_epoch)

    def _step(self, share: float) -> float:
        """One sandwich: widest, slimmest, random tuples. Returns the widest net's loss."""
        images, labels = self.batches.batch(self.state.step, share)
        tuples = width_tuples(self.preset.architecture, self.recipe, self.seed, self.state.step)
        loss = backward(
            self.model, images, labels, tuples, self.recipe, self.workers, self._ask if self.teacher else None
        )
        self.optimizer.step(schedule(share, self.recipe), self.workers)
        if self.average:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    self.average[name].lerp_(p, 1.0 - self.recipe.ema_decay)
        return loss

    def _validate(self, loss: float, share: float) -> None:
        images = self.batches.normalize(self.validation.pixels)
        labels = torch.from_numpy(self.validation.labels).to(self.device)
        parts = list(zip(torch.split(images, VALIDATION_BATCH), torch.split(labels, VALIDATION_BATCH), strict=True))
        top1 = {}
        for width in self.preset.architecture.widths:
            right = self.workers.map(partial(self._right, (width,) * self.preset.architecture.segments), parts)
            top1[f"{width:g}"] = round(sum(right) / max(1, len(labels)), 4)
        epoch = self.state.step / self.batches.per_epoch
        size = self.batches.size_at(share)
        self.state.history.append(
            EpochRecord(round(epoch, 2), round(self.state.seconds, 1), round(loss, 4), size, top1)
        )

    def _right(self, widths: tuple[float, ...], part: tuple[Tensor, Tensor]) -> int:
        """How many of some validation images are answered right at a width tuple."""
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            return int((self.model(part[0], widths).argmax(dim=1) == part[1]).sum())

    def _progress(self, loss: float, share: float) -> FitProgress:
        state = self.state
        epoch, size = state.step / self.batches.per_epoch, self.batches.size_at(share)
        return FitProgress(state.step, self._share(), epoch, loss, size, state.seconds, tuple(state.history))

    def finish(self) -> FitResult:
        """Writes the checkpoint. The training state stays beside it, ignored by git."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if self.average:
                    p.copy_(self.average[name])
        before = self.before.training if self.before else None
        training = checkpoint.Training(
            preset=self.preset.name,
            recipe=self.recipe,
            seed=self.seed,
            data=self.data.name,
            source=self.data.source,
            seconds=round(self.state.seconds + (before.seconds if before else 0.0), 1),
            history=continued(before.history if before else (), self.state.history),
            started_from=self.before.weights_sha256 if self.before else "",
            teacher=self.teacher.record if self.teacher else None,
            outside_data=self._outside_data(),
        )
        mean, std = self.statistics
        checkpoint.save(self.model, self.out, classes=self.data.classes, mean=mean, std=std, training=training)
        return FitResult(self.model, self.out, tuple(self.state.history), self.state.seconds)

    def _outside_data(self) -> str:
        """What the weights owe to other data, through the teacher or through what they started from."""
        before = self.before.training.outside_data if self.before and self.before.training else ""
        teacher = self.teacher.record.outside_data if self.teacher else ""
        return "; ".join(dict.fromkeys(part for part in (before, teacher) if part))


def continued(before: tuple[EpochRecord, ...], history: Sequence[EpochRecord]) -> tuple[EpochRecord, ...]:
    """The curve of a further run, after the one it began with."""
    if not before:
        return tuple(history)
    epoch, seconds = before[-1].epoch, before[-1].seconds
    shifted = [
        msgspec.structs.replace(
            record, epoch=round(record.epoch + epoch, 2), seconds=round(record.seconds + seconds, 1)
        )
        for record in history
    ]
    return (*before, *shifted)


def schedule(share: float, recipe: Recipe) -> float:
    """Learning-rate factor: linear warm-up, then half a cosine to 0."""
    if share < recipe.warmup:
        return (share + 1e-3) / (recipe.warmup + 1e-3)
    return 0.5 * (1.0 + float(np.cos(np.pi * (share - recipe.warmup) / (1.0 - recipe.warmup))))
