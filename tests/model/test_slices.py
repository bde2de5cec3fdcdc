"""A network run by its deployed slices is the network run whole, to the last bit, at every width tuple."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slim_scheduler.core.errors import InputError
from slim_scheduler.model.architecture import Architecture, tuple_cost
from slim_scheduler.model.shape import shape_of
from slim_scheduler.model.slim_resnet import SlimResNet

WIDTHS = (0.25, 0.5, 0.75, 1.0)
SMALL = Architecture(
    item_shape=(3, 16, 16),
    classes=7,
    channels=(16, 32, 32, 64),
    blocks=(1, 2, 1, 1),
    stem_channels=16,
    channels_per_group=4,
    pooling="mean+max",
)
TWO_SEGMENTS = Architecture(
    item_shape=(1, 8, 8),
    classes=3,
    widths=(0.5, 1.0),
    channels=(8, 16),
    blocks=(1, 2),
    strides=(2, 1),
    stem_channels=8,
    stem_scales=False,
    channels_per_group=2,
)


def network(arch: Architecture, seed: int = 0) -> SlimResNet:
    torch.manual_seed(seed)
    return SlimResNet(arch, "test").requires_grad_(False)


MODEL = network(SMALL)
SLICES = {(s, w): MODEL.slice(s, w, "cpu") for s in range(4) for w in WIDTHS}


def run_by_slices(x: torch.Tensor, widths: tuple[float, ...]) -> torch.Tensor:
    previous = None
    for segment, width in enumerate(widths):
        SLICES[segment, width].build_variant(previous)
        x = SLICES[segment, width].run(x, previous)
        previous = width
    return x


@settings(max_examples=60, deadline=None)
@given(widths=st.tuples(*[st.sampled_from(WIDTHS)] * 4), batch=st.integers(1, 9), seed=st.integers(0, 1000))
def test_segments_one_after_the_other_equal_the_whole_network_exactly(widths, batch, seed):
    with torch.no_grad():
        x = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(run_by_slices(x, widths), MODEL(x, widths))


@settings(max_examples=40, deadline=None)
@given(widths=st.tuples(*[st.sampled_from(WIDTHS)] * 4), batch=st.integers(2, 33))
def test_an_item_in_a_batch_gets_the_answer_it_gets_alone(widths, batch):
    x = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
    together = run_by_slices(x, widths)
    alone = torch.cat([run_by_slices(item[None], widths) for item in x])
    assert (together - alone).abs().max() < 1e-4


def test_every_tuple_of_another_number_of_segments_and_widths_runs():
    model = network(TWO_SEGMENTS)
    x = torch.randn(2, 1, 8, 8)
    for widths in itertools.product((0.5, 1.0), repeat=2):
        first = model.slice(0, widths[0], "cpu").run(x, None)
        assert first.shape[1:] == model.activation_shape(0, widths[0])
        last = model.slice(1, widths[1], "cpu")
        last.build_variant(widths[0])
        assert torch.equal(last.run(first, widths[0]), model(x, widths))


def test_gradients_do_not_change_what_the_network_computes():
    model = SlimResNet(SMALL)
    x = torch.randn(3, 3, 16, 16)
    training = model(x, (1.0, 0.5, 0.25, 0.75))
    with torch.no_grad():
        assert torch.equal(training, model(x, (1.0, 0.5, 0.25, 0.75)))


def test_a_narrow_segment_is_a_prefix_of_the_wide_one_up_to_its_first_norm():
    wide, narrow = MODEL.own_weights(0, 1.0), MODEL.own_weights(0, 0.5)
    assert torch.equal(wide["stem"][:8], narrow["stem"])
    assert torch.equal(wide["stem.scale"][:8], narrow["stem.scale"])


def test_standardised_filters_have_mean_zero_and_norm_one_at_every_width():
    for width in WIDTHS:
        weight = MODEL.own_weights(1, width)["block0.conv2"]
        assert weight.mean(dim=(1, 2, 3)).abs().max() < 1e-6
        assert (weight.flatten(1).norm(dim=1) - 1).abs().max() < 1e-3


def test_a_slice_owns_contiguous_memory_of_the_size_it_says():
    piece = MODEL.slice(1, 0.5, "cpu")
    master = {p.data_ptr() for p in MODEL.parameters()}
    own = MODEL.own_weights(1, 0.5)
    assert piece.weight_bytes == sum(w.numel() * 4 for w in own.values())
    assert piece.variant_bytes == 0
    built = piece.build_variant(0.75)
    assert built == piece.build_variant(0.75) == piece.variant_bytes
    for weight in [*piece._own.values(), *piece._variants[0.75].values()]:
        assert weight.untyped_storage().nbytes() == weight.numel() * 4
        assert weight.data_ptr() not in master


def test_a_slice_survives_the_way_to_host_memory_and_back():
    piece, x = MODEL.slice(0, 1.0, "cpu"), torch.randn(2, 3, 16, 16)
    before = piece.run(x, None)
    piece.to_host()
    piece.to_device()
    assert torch.equal(before, piece.run(x, None))


def test_running_without_the_variant_says_what_to_do():
    with pytest.raises(InputError, match=r"no variant for previous width 0\.25; call build_variant first"):
        MODEL.slice(1, 1.0, "cpu").run(torch.randn(1, 4, 16, 16), 0.25)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MODEL.slice(0, 0.6, "cpu"), r"width 0\.6 is not served; available: 0\.25, 0\.5, 0\.75, 1"),
        (lambda: MODEL.slice(4, 1.0, "cpu"), r"segment 4 does not exist; the network has segments 0\.\.3"),
        (lambda: MODEL(torch.randn(1, 3, 16, 16), (1.0, 1.0)), "has 2 entries; the network has 4"),
        (lambda: Architecture(channels=(60, 128, 256, 512)), "no multiple of channels_per_group 16"),
        (lambda: Architecture(widths=(0.5, 0.25, 1.0)), "must be ascending"),
        (lambda: Architecture(blocks=(1, 1)), "must be 4 positive numbers"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_shape_counts_what_the_slices_hold():
    shape = shape_of(MODEL)
    shape.check()
    assert shape.widths == WIDTHS
    assert shape.segments == 4
    assert shape.input_bytes == 3 * 16 * 16 * 4
    assert shape.activation_bytes[0] == tuple(4 * c * 16 * 16 for c in (4, 8, 12, 16))
    assert shape.activation_bytes[3] == (28,) * 4
    for widths in ((1.0,) * 4, (0.25, 1.0, 0.5, 0.75)):
        macs, parameters = tuple_cost(SMALL, widths)
        assert shape.tuple_macs(widths) == macs
        indices = [WIDTHS.index(w) for w in widths]
        held = sum(shape.weight_bytes[s][i] for s, i in enumerate(indices))
        held += sum(shape.variant_bytes[s][indices[s - 1]][indices[s]] for s in range(1, 4))
        assert held == 4 * parameters


def test_the_papers_size_costs_what_is_known_of_it():
    """35 / 139 / 313 / 555 million multiply-adds, 11.2 million parameters: ResNet-18 for CIFAR."""
    costs = [tuple_cost(Architecture(), (width,) * 4) for width in WIDTHS]
    assert [round(macs / 1e6) for macs, _ in costs] == [35, 139, 313, 555]
    assert round(costs[-1][1] / 1e6, 1) == 11.2


def test_workspace_is_the_peak_that_the_allocator_sees():
    for segment, width in ((0, 1.0), (1, 0.5), (3, 1.0)):
        previous = None if segment == 0 else 1.0
        piece = MODEL.slice(segment, width, "cpu")
        piece.build_variant(previous)
        shape = (3, 16, 16) if segment == 0 else MODEL.activation_shape(segment - 1, 1.0)
        x = torch.randn(64, *shape).contiguous(memory_format=torch.channels_last)
        piece.run(x, previous)
        with torch.profiler.profile(profile_memory=True) as profiler:
            piece.run(x, previous)
        held = peak = 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        stated = 64 * MODEL.workspace_bytes(segment, width)
        scratch = 2 * (piece.weight_bytes + piece.variant_bytes)  # the library reorders weights
        assert 0.5 * stated <= peak <= stated + scratch
