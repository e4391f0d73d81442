"""From a picture to the tensor a model sees: shorter side resized, centre crop, the model's mean and deviation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from pydantic import ConfigDict
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "nearest", "box")
_MAX_ASPECT = 16
_MAX_SIDE = 16384
_Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocess:
    """How images reach a model: shorter side to `resize`, centre square, centre crop to `size`, normalised."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    size: int = 224
    resize: int = 256
    interpolation: str = "bicubic"
    mean: _Triple = _IMAGENET_MEAN
    std: _Triple = _IMAGENET_STD

    def __post_init__(self) -> None:
        for name in ("size", "resize"):
            side = getattr(self, name)
            # The whole numbers of NumPy are not of type int.
            if not isinstance(side, Integral) or side > _MAX_SIDE:  # type: ignore[operator]
                raise ValueError(f"{name} must be a whole number of at most {_MAX_SIDE} pixels; got {side!r}")
        if self.size < 1 or self.resize < self.size:
            raise ValueError(f"resize ({self.resize}) must be at least size ({self.size}), and both at least 1")
        if self.interpolation not in _INTERPOLATIONS:  # it may be anything, as read from a file
            raise ValueError(f"unknown interpolation {self.interpolation!r}; use one of {', '.join(_INTERPOLATIONS)}")
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            raise ValueError(f"mean and std need three numbers each, std above 0; got {self.mean} and {self.std}")

    @classmethod
    def for_native(
        cls,
        native_size: int,
        mean: _Triple = _IMAGENET_MEAN,
        std: _Triple = _IMAGENET_STD,
        size: int | None = None,
    ) -> Preprocess:
        """The default of every analysis: 224 from 256; a smaller native size is kept; `size` overrides."""
        # 224 also for models that are larger at home (DINOv2: 518), as the paper measures them.
        side = min(native_size, 224)
        if size is not None:
            side = size
        resize = side  # small images have no margin to lose
        if side >= 224:
            resize = round(side * 256 / 224)
        return cls(size=side, resize=resize, mean=_triple(mean), std=_triple(std))

    def decode(self, image: Image.Image) -> Tensor:
        """A picture to uint8 (3, resize, resize): shorter side to `resize` (antialiased), then the centre square."""
        image = as_rgb(image)
        short = min(image.size)
        longest = _MAX_ASPECT * short
        if max(image.size) > longest:  # its ends are cropped away below, and would take all memory
            image = F.center_crop(image, [min(image.height, longest), min(image.width, longest)])
        width, height = image.size
        if short != self.resize:
            width = self.resize * width // short
            height = self.resize * height // short
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        # The square now, so that all images of a batch have one size; `crop` cuts the rest of the margin.
        left = _margin(width, self.resize)
        top = _margin(height, self.resize)
        image = image.crop((left, top, left + self.resize, top + self.resize))
        # A copy, because the memory of a picture is read-only and torch would warn.
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    def crop(self, images_u8: Tensor) -> Tensor:
        """Centre crop of (..., 3, H, W) to (..., 3, size, size), same dtype."""
        height, width = images_u8.shape[-2:]
        top = _margin(height, self.size)
        left = _margin(width, self.size)
        return images_u8[..., top : top + self.size, left : left + self.size]

    def fit(self, images_u8: Tensor) -> Tensor:
        """Square images (B, 3, S, S) of any side to (B, 3, resize, resize), on their own device."""
        if images_u8.shape[-1] == self.resize:
            return images_u8
        mode = InterpolationMode(self.interpolation)
        return F.resize(images_u8, [self.resize, self.resize], interpolation=mode, antialias=True)

    def normalise(self, images: Tensor) -> Tensor:
        """Values 0..255, uint8 or float, (..., 3, size, size) to normalised float32 of the same shape."""
        scale, shift = _scale_and_shift(self.mean, self.std, images.device)
        # One pass over the images: (x / 255 - mean) / std as x * scale + shift.
        return torch.addcmul(shift, images.to(torch.float32), scale)

    def __call__(self, image: Image.Image) -> Tensor:
        """A picture to normalised float32 (3, size, size)."""
        return self.normalise(self.crop(self.decode(image)))


def as_rgb(image: Image.Image, turned: bool = True) -> Image.Image:
    """`image` in 8-bit RGB as viewers show it: the high byte of 16 bits, and turned as its EXIF orientation says.

    Without `turned` its pixels stay where they are, which is where those of a mask are.
    """
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours; otherwise Pillow warns
    elif image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("an image of 32 bits per pixel does not say which value is white: save it with 8 or 16 bits")
    elif image.mode.startswith("I"):
        # Pillow's own conversion clips: all that is brighter than 1/256 of the range would be white.
        high = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        high.info = image.info
        image = high
    if image.mode != "RGB":
        image = image.convert("RGB")
    if not turned:
        return image
    try:
        with warnings.catch_warnings(action="ignore"):
            orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged metadata; the pixels are whole
        return image
    return image if orientation == 1 else ImageOps.exif_transpose(image)


def _triple(values: Any) -> _Triple:
    try:
        first, second, third = map(float, values)
    except (TypeError, ValueError):
        raise ValueError(f"mean and std need three numbers each; got {str(values)[:60]}") from None
    return first, second, third


def _margin(side: int, target: int) -> int:
    if side < target:
        raise ValueError(f"cannot crop {target} pixels from an image of side {side}")
    # torchvision's centre crop rounds in this way.
    return round((side - target) / 2)


@lru_cache(maxsize=32)
def _scale_and_shift(mean: _Triple, std: _Triple, device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept per device: building them at every step would copy from the host and wait for it.
    # They are kept, and a tensor made in inference mode could not take part in a later training.
    with torch.inference_mode(False):
        mean_c = torch.tensor(mean, dtype=torch.float64).view(3, 1, 1)
        std_c = torch.tensor(std, dtype=torch.float64).view(3, 1, 1)
        scale = 1 / (255 * std_c)
        shift = -mean_c / std_c
        return scale.to(device, torch.float32), shift.to(device, torch.float32)
