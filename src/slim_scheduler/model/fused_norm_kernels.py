"""The kernels of `fused_norm`, in Triton. One program: one group of channels of one image, channels last."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def forward(
    x, beside, scale, shift, out, mean, rstd, eps, pixels, channels,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, with_beside: tl.constexpr,
):  # fmt: skip
    image, group = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, tile_rows), group * tile_columns + tl.arange(0, tile_columns)
    place = image.to(tl.int64) * pixels * channels + rows[:, None] * channels + columns[None, :]
    inside = (rows < pixels)[:, None] & (columns < channels)[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    count = pixels * tile_columns
    middle = tl.sum(values) / count
    centred = tl.where(inside, values - middle, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred) / count + eps)
    y = centred * inverse * tl.load(scale + columns)[None, :] + tl.load(shift + columns)[None, :]
    if with_beside:
        y += tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (y * tl.sigmoid(y)).to(out.dtype.element_ty), mask=inside)
    one = image * tl.num_programs(1) + group
    tl.store(mean + one, middle)
    tl.store(rstd + one, inverse)


@triton.jit
def backward(
    x, beside, scale, shift, mean, rstd, gradient, of_x, of_beside, of_scale, of_shift, pixels, channels,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, with_beside: tl.constexpr,
):  # fmt: skip
    image, group = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, tile_rows), group * tile_columns + tl.arange(0, tile_columns)
    place = image.to(tl.int64) * pixels * channels + rows[:, None] * channels + columns[None, :]
    inside = (rows < pixels)[:, None] & (columns < channels)[None, :]
    one = image * tl.num_programs(1) + group
    inverse = tl.load(rstd + one)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    normal = tl.where(inside, (values - tl.load(mean + one)) * inverse, 0.0)
    weight = tl.load(scale + columns)[None, :]
    y = normal * weight + tl.load(shift + columns)[None, :]
    if with_beside:
        y += tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
    part = tl.sigmoid(y)
    slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * part * (1.0 + y * (1.0 - part))
    if with_beside:
        tl.store(of_beside + place, slope.to(of_beside.dtype.element_ty), mask=inside)
    tl.store(of_scale + image * channels + columns, tl.sum(slope * normal, axis=0))
    tl.store(of_shift + image * channels + columns, tl.sum(slope, axis=0))
    slope *= weight
    count = pixels * tile_columns
    level, along = tl.sum(slope) / count, tl.sum(slope * normal) / count
    tl.store(of_x + place, (inverse * (slope - level - normal * along)).to(of_x.dtype.element_ty), mask=inside)
