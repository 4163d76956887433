"""Two views of every image, made in batch on the images' device from numbers drawn beforehand on the CPU.

The operations work on floats from 0 to 1, (n, channels, height, width), with one number an image. A number that leaves
its image alone (a factor of 1, a turn or a deviation of 0) leaves it exactly as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from prospr.lab.data import Split, normalise

LUMA = (0.299, 0.587, 0.114)
"""What red, green and blue give to the brightness of a grey pixel (ITU-R BT.601)."""


@dataclass(frozen=True)
class View:
    """How a view of an image is drawn: crop and mirror, colour jitter, grey, blur, solarize, in this order (BYOL's).

    Shares are probabilities. `brightness`, `contrast` and `saturation` are the largest change of a factor from 1, `hue`
    the largest turn. Images of one channel keep their saturation, hue and grey. The blur's kernel spans a tenth of the
    image, as in BYOL (23 of 224 pixels), and at least 3 pixels.

    >>> draws = View().draw(4, torch.Generator().manual_seed(0))
    >>> view(torch.zeros(4, 3, 32, 32), View(), draws).shape
    torch.Size([4, 3, 32, 32])
    """

    area: tuple[float, float] = (0.2, 1.0)
    """The crop's share of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The crop's width over its height."""
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.2
    blur: float = 0.0
    sigma: tuple[float, float] = (0.1, 2.0)
    """The blur's deviation, in pixels."""
    solarize: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "gray", "blur", "solarize", "brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"View({name}={getattr(self, name)}): use a number from 0 to 1")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"View(hue={self.hue}): use a share of a turn, 0 to 0.5")
        for name, highest in (("area", 1.0), ("ratio", math.inf), ("sigma", math.inf)):
            low, high = getattr(self, name)
            if not 0 < low <= high <= highest:
                raise ValueError(f"View({name}={(low, high)}): use two numbers above 0, the lower first")

    def draw(self, n: int, rng: torch.Generator) -> Draws:
        """Everything random about the views of `n` images, on the CPU."""

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(n, generator=rng)

        def chance(share: float) -> Tensor:
            return torch.rand(n, generator=rng) < share

        area, slope = uniform(*self.area), uniform(*map(math.log, self.ratio)).exp()
        # A crop that would not fit is as long as the image on that side: torchvision draws again, at most ten times.
        width, height = (area * slope).sqrt().clamp(max=1), (area / slope).sqrt().clamp(max=1)
        top, left = uniform(0, 1) * (1 - height), uniform(0, 1) * (1 - width)
        mirrored, jittered = chance(self.flip), chance(self.jitter)
        changes = [uniform(1 - by, 1 + by) for by in (self.brightness, self.contrast, self.saturation)]
        brightness, contrast, saturation = (torch.where(jittered, change, 1.0) for change in changes)
        hue = torch.where(jittered, uniform(-self.hue, self.hue), 0.0)
        gray, sigma = chance(self.gray), uniform(*self.sigma)
        sigma = torch.where(chance(self.blur), sigma, 0.0)
        solarized = chance(self.solarize)
        order = tuple(torch.randperm(4, generator=rng).tolist())
        moves = (top, left, height, width, mirrored)
        return Draws(*moves, brightness, contrast, saturation, hue, gray, sigma, solarized, order)


SMALL_VIEWS = (View(), View(solarize=0.2))
"""For images of about 32 pixels: BYOL's without its blur, which takes from so small an image most of what it shows."""
BYOL_VIEWS = (View(area=(0.08, 1.0), blur=1.0), View(area=(0.08, 1.0), blur=0.1, solarize=0.2))
"""As in the BYOL paper, for photographs of 224 pixels."""


@dataclass(frozen=True)
class Draws:
    """What is drawn for a view of each image. The crop is in shares of the image."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    mirrored: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    gray: Tensor
    sigma: Tensor
    solarized: Tensor
    order: tuple[int, ...]
    """In which order brightness, contrast, saturation and hue are changed: one order a batch."""

    def to(self, device: torch.device | str) -> Draws:
        """All numbers in one copy, which a GPU does not wait for."""
        names = [field.name for field in fields(self) if field.name != "order"]
        packed = torch.stack([getattr(self, name).float() for name in names])
        device = torch.device(device)
        if device.type == "cuda":
            packed = packed.pin_memory()
        rows = packed.to(device, non_blocking=True)
        return replace(self, **{name: row.to(getattr(self, name).dtype) for name, row in zip(names, rows, strict=True)})


def two_views(images: Tensor, part: Split, views: tuple[View, View], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two views of uint8 `images`, normalised by `part`'s mean and deviation, on the device they are on.

    >>> from prospr.lab.data import digits
    >>> part = as_bytes(digits().train)
    >>> first, second = two_views(part.images[:8], part, SMALL_VIEWS, torch.Generator().manual_seed(0))
    >>> first.shape, first.dtype, bool((first == second).all())
    (torch.Size([8, 1, 8, 8]), torch.float32, False)
    """
    pixels = images.float() / 255
    drawn = [one.draw(len(images), rng).to(images.device) for one in views]
    first, second = (view(pixels, one, draws) for one, draws in zip(views, drawn, strict=True))
    return normalise(first * 255, part.mean, part.std), normalise(second * 255, part.mean, part.std)


def view(images: Tensor, settings: View, draws: Draws) -> Tensor:
    """The view of each image that was drawn. What `settings` give no chance is not computed."""
    images = crop_resize(images, draws.top, draws.left, draws.height, draws.width, draws.mirrored)
    if settings.jitter > 0:
        changes = (
            lambda x: scale_brightness(x, draws.brightness),
            lambda x: scale_contrast(x, draws.contrast),
            lambda x: scale_saturation(x, draws.saturation),
            lambda x: shift_hue(x, draws.hue),
        )
        for index in draws.order:
            images = changes[index](images)
    if settings.gray > 0:
        images = torch.where(_each(draws.gray), luma(images).expand_as(images), images)
    if settings.blur > 0:
        images = blur(images, draws.sigma)
    if settings.solarize > 0:
        images = torch.where(_each(draws.solarized), solarize(images), images)
    return images


def crop_resize(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, mirrored: Tensor) -> Tensor:
    """Each image's rectangle (in shares of the image) at the image's size, bilinear, mirrored where asked.

    >>> image = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).view(1, 1, 2, 2)
    >>> whole, none = torch.ones(1), torch.zeros(1)
    >>> crop_resize(image, none, none, whole, whole, torch.tensor([True])).view(2, 2)
    tensor([[1., 0.],
            [3., 2.]])
    """
    # In affine_grid's coordinates the image goes from -1 to 1: the crop's half sizes, and its centre.
    across = torch.where(mirrored, -width, width)
    zero = torch.zeros_like(width)
    rows = (across, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1)
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def scale_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """The pixels times `factor`.

    >>> scale_brightness(torch.full((1, 1, 1, 1), 0.4), torch.tensor([1.5])).item()
    0.6000000238418579
    """
    return (images * _each(factor)).clamp(0, 1)


def scale_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """The distance of each pixel from the image's mean brightness times `factor`."""
    mean = luma(images).mean((1, 2, 3), keepdim=True)
    return _blend(images, mean, factor)


def scale_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """The distance of each pixel from its own grey times `factor`."""
    return _blend(images, luma(images), factor) if images.shape[1] == 3 else images


def shift_hue(images: Tensor, turn: Tensor) -> Tensor:
    """The hue of each pixel turned: a third of a turn makes red green.

    >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    >>> shift_hue(red, torch.tensor([0.5])).flatten()       # its complement
    tensor([0., 1., 1.])
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    # HSV: the hue in sixths of a turn, measured from the strongest of the three; and its inverse, channel by channel.
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * turn.view(-1, 1, 1)
    places = [(start + hue).remainder(6) for start in (5, 3, 1)]
    turned = torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in places], 1)
    return torch.where(_each(turn) == 0, images, turned)


def luma(images: Tensor) -> Tensor:
    """The grey of each pixel, as one channel.

    >>> round(luma(torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)).item(), 3)
    0.299
    """
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Each image blurred by a Gaussian of deviation `sigma` pixels; 0 leaves it as it is. Edges are mirrored.

    >>> dot = F.pad(torch.ones(1, 1, 1, 1), (1, 1, 1, 1))
    >>> blur(dot, torch.zeros(1)).sum().item(), round(blur(dot, torch.ones(1))[0, 0, 1, 1].item(), 4)
    (1.0, 0.2042)
    """
    for axis in (2, 3):
        images = _blur_along(images, sigma, axis)
    return images


def _blur_along(images: Tensor, sigma: Tensor, axis: int) -> Tensor:
    size = images.shape[axis]
    radius = min(max(1, round(0.05 * size)), size - 1)
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    weights = (-(offsets**2) / (2 * sigma.clamp(min=1e-3).view(-1, 1) ** 2)).exp()
    weights = weights / weights.sum(1, keepdim=True)
    pad = (0, 0, radius, radius) if axis == 2 else (radius, radius, 0, 0)
    padded = F.pad(images, pad, mode="reflect")
    # A sum of shifted images: a convolution with a kernel for each image would be one of n groups, which is slower.
    total = torch.zeros_like(images)
    for tap in range(2 * radius + 1):
        total = total + padded.narrow(axis, tap, size) * _each(weights[:, tap])
    return total


def solarize(images: Tensor) -> Tensor:
    """Pixels of at least one half inverted.

    >>> solarize(torch.tensor([0.25, 0.5, 1.0])).tolist()
    [0.25, 0.5, 0.0]
    """
    return torch.where(images >= 0.5, 1 - images, images)


def as_bytes(part: Split) -> Split:
    """The part with uint8 images, which `inputs` normalises to what they were; floats are rounded to 256 levels.

    >>> from prospr.lab.data import digits
    >>> part = digits().train
    >>> bool((as_bytes(part).inputs() - part.inputs()).abs().max() < 0.01)
    True
    """
    if part.images.dtype == torch.uint8:
        return part
    low, high = part.images.amin(), part.images.amax()
    step = torch.where(high > low, (high - low) / 255, torch.ones_like(high))
    channels = part.images.shape[1]
    levels = ((part.images - low) / step).round().to(torch.uint8)
    return replace(part, images=levels, mean=(-low / step).repeat(channels), std=(1 / step).repeat(channels))


def _blend(images: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    share = _each(factor)
    return (share * images + (1 - share) * base).clamp(0, 1)


def _each(numbers: Tensor) -> Tensor:
    """One number an image, to be spread over its pixels."""
    return numbers.view(-1, 1, 1, 1)
