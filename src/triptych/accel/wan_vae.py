"""Wan's VAE decoder without its copies: channels-last, compiled blocks, several latent frames at a time.

Why it is faster than the stock one, which decodes one latent frame after the other: there each causal convolution
clones its input's last two frames, concatenates, pads in time and in space, and only then convolves. Here the cached
frames are joined to the normalised input in one fused kernel and the spatial padding is left to the convolution. The
arithmetic is the same; results differ by rounding only.

Two streams of time exist in the decoder: the first latent frame gives one output frame, each later one gives four. So
the first frame is decoded alone, and the rest in chunks of ``chunk`` latent frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.accel.compiling import Overflow
from triptych.accel.sizes import Sizes

_KEEP = 2
"""Input frames that a causal convolution with a kernel of three needs from the past."""


class Strip(Protocol):
    """The part of the pictures that this process makes; see `triptych.accel.parallel.decoder`."""

    def before(self, x: Tensor, level: int) -> Tensor:
        """What upsampling block ``level`` needs of what comes to it."""
        ...


class Sharing(Protocol):
    """How several processes make the pictures together."""

    def strip(self, latents: Tensor) -> Any | None:
        """This one's part; None: all of them."""
        ...

    def whole(self, pixels: Tensor, strip: Any) -> Tensor:
        """Pictures of all parts."""
        ...


class WanVae(Protocol):
    """What is used of diffusers' AutoencoderKLWan."""

    decoder: Any
    post_quant_conv: Any
    config: Any


def supports(vae: object) -> bool:
    """Whether this is a VAE that `supports_class` knows."""
    return supports_class(type(vae).__name__, getattr(vae, "config", None))


def supports_class(name: str, config: object) -> bool:
    """Whether a class with this config is a Wan 2.1 VAE (the residual 2.2 variant has other blocks)."""
    return (
        name in ("AutoencoderKLWan", "AutoencoderKLQwenImage")
        and not getattr(config, "is_residual", False)
        and getattr(config, "patch_size", None) is None
    )


def _normalise(x: Tensor, norm: Any) -> Tensor:
    """RMS norm over the channels, then SiLU, as the stock block computes it."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return F.silu(F.normalize(wide, dim=1).to(x.dtype) * norm.scale * norm.gamma + norm.bias)


def _convolve(x: Tensor, conv: Any) -> Tensor:
    """A causal convolution whose past frames already stand in front of ``x``; spatial padding happens inside it."""
    spatial = int(conv._padding[0])
    return F.conv3d(x, conv.weight, conv.bias, conv.stride, (0, spatial, spatial))


def _join(past: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` with its past in front, and the past of the next chunk."""
    joined = torch.cat([past, x], dim=2).contiguous(memory_format=torch.channels_last_3d)
    # Dense strides whatever the length of the chunk was: a compiled function is made anew for others.
    return joined, joined[:, :, -_KEEP:].clone(memory_format=torch.channels_last_3d)


def _residual(x: Tensor, past1: Tensor, past2: Tensor, block: Any) -> tuple[Tensor, Tensor, Tensor]:
    shortcut = block.conv_shortcut(x)
    joined, past1 = _join(past1, _normalise(x, block.norm1))
    x = _convolve(joined, block.conv1)
    joined, past2 = _join(past2, _normalise(x, block.norm2))
    return _convolve(joined, block.conv2) + shortcut, past1, past2


def _causal(x: Tensor, past: Tensor, conv: Any) -> tuple[Tensor, Tensor]:
    joined, past = _join(past, x)
    return _convolve(joined, conv), past


def _head(x: Tensor, past: Tensor, norm: Any, conv: Any) -> tuple[Tensor, Tensor]:
    joined, past = _join(past, _normalise(x, norm))
    return _convolve(joined, conv).clamp(-1.0, 1.0), past


def _double_time(x: Tensor, past: Tensor, conv: Any) -> tuple[Tensor, Tensor]:
    """Two frames out of each: the convolution's channel halves are the even and the odd frames."""
    y, past = _causal(x, past, conv)
    b, c, t, h, w = x.shape
    return y.reshape(b, 2, c, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c, t * 2, h, w), past


def _double_space(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nearest-neighbour upsampling by two and a 3x3 convolution as one 2x2 convolution at the lower resolution.

    Each output pixel of an upsampled 3x3 window sees only 2x2 input pixels; `_four_phases` has summed the weights that
    fall on the same one. The four phases are the channel quarters of the result, and are woven together here.
    """
    b, c, t, h, w = x.shape
    frames = x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w).contiguous(memory_format=torch.channels_last)
    quarters = F.conv2d(frames, weight, bias, padding=1).unflatten(1, (2, 2, -1))
    rows = [
        torch.stack([quarters[:, i, j, :, i : i + h, j : j + w] for j in (0, 1)], dim=-1).flatten(-2) for i in (0, 1)
    ]
    y = torch.stack(rows, dim=-2).flatten(-3, -2)
    y = y.reshape(b, t, y.shape[1], 2 * h, 2 * w).permute(0, 2, 1, 3, 4)
    return y.contiguous(memory_format=torch.channels_last_3d)


def _four_phases(weight: Tensor) -> Tensor:
    """3x3 weights [out, in, 3, 3] over an upsampled image as 2x2 weights [4 * out, in, 2, 2] over the small one."""

    def fold(w: Tensor, dim: int, phase: int) -> Tensor:
        first, middle, last = w.unbind(dim)
        pair = (first, middle + last) if phase == 0 else (first + middle, last)
        return torch.stack(pair, dim)

    wide = weight.float()
    phases = [fold(fold(wide, 2, i), 3, j) for i in (0, 1) for j in (0, 1)]
    return torch.cat(phases).to(weight.dtype).contiguous(memory_format=torch.channels_last)


def _attend(x: Tensor, attention: Any) -> Tensor:
    return attention(x).contiguous(memory_format=torch.channels_last_3d)


def _padded(tensor: Tensor, dim: int, align: int, groups: int = 1) -> Tensor:
    """``tensor`` with zeros at the end of each of ``groups`` equal parts of ``dim``, up to a multiple of ``align``."""
    parts = tensor.unflatten(dim, (groups, -1))
    missing = -parts.shape[dim + 1] % align
    shape = [*parts.shape]
    shape[dim + 1] = missing
    return torch.cat([parts, parts.new_zeros(shape)], dim=dim + 1).flatten(dim, dim + 1)


def _pad_channels(decoder: Any, align: int) -> None:
    """Give every inner layer of a decoder a multiple of ``align`` channels; the added ones stay zero throughout."""
    time_convs = {up.time_conv for up in decoder.modules() if getattr(up, "mode", "") == "upsample3d"}
    inner: list[Any] = list(decoder.modules())
    for module in inner:
        if isinstance(module, nn.Conv3d | nn.Conv2d):
            assert module.bias is not None
            groups = 2 if module in time_convs else 1  # its halves are the even and the odd frames
            weight, bias = module.weight.data, module.bias.data
            if module is not decoder.conv_in:
                weight = _padded(weight, 1, align)
            if module is not decoder.conv_out:
                weight, bias = _padded(weight, 0, align, groups), _padded(bias, 0, align, groups)
            module.weight.data, module.bias.data = weight, bias
        elif hasattr(module, "gamma"):
            module.gamma.data = _padded(module.gamma.data, 0, align)
        elif hasattr(module, "conv1"):
            module.in_dim += -module.in_dim % align
            module.out_dim += -module.out_dim % align


class WanVaeDecoder:
    """Decodes one video; keeps the past of every causal convolution between chunks.

    With ``overflow`` blocks are compiled for those ``sizes`` of latents that were rehearsed: there are about twenty
    graphs for each, since paddings and pasts are cut to the size, and none that serve all. ``align`` pads channel
    counts with zeros to a multiple: cuDNN's fast convolutions want multiples of 64, and Wan's widest layers have 96.
    """

    def __init__(
        self,
        vae: WanVae,
        *,
        overflow: Overflow | None = None,
        sizes: Sizes | None = None,
        chunk: int = 4,
        align: int = 1,
    ) -> None:
        self.vae = vae
        self._sizes = sizes = sizes or Sizes()
        self.chunk = chunk
        self.listener: Callable[[Tensor, int], None] | None = None
        """Is given frames as they are done, [1, 3, frames, height, width] in -1..1, and how many there will be."""
        self.sharing: Sharing | None = None
        """What divides the pictures between several processes."""
        wrap: Callable[[Any], Any] = (
            (lambda f: f) if overflow is None else partial(overflow.compiled_for, sizes=sizes, others=False)
        )
        self._residual = wrap(_residual)
        self._causal = wrap(_causal)
        self._double_time = wrap(_double_time)
        self._double_space = wrap(_double_space)
        self._head = wrap(_head)
        if vae.decoder.conv_in.out_channels % align == 0:  # attention there scales by its width: it cannot be padded
            _pad_channels(vae.decoder, align)
        for module in vae.decoder.modules():
            if isinstance(module, nn.Conv3d):
                module.to(memory_format=torch.channels_last_3d)  # pyright: ignore[reportCallIssue]
        self._phases: dict[object, tuple[Tensor, Tensor]] = {}
        for up in vae.decoder.up_blocks:
            for resample in up.upsamplers or ():
                conv = resample.resample[1]
                self._phases[resample] = (_four_phases(conv.weight), conv.bias.repeat(4))

    def chunks(self, latents: Tensor) -> Iterator[Tensor]:
        """Frames as they are done, each [batch, 3, frames, height, width] in -1..1.

        latents: [batch, channels, latent frames, height / 8, width / 8], already denormalised.
        """
        past: dict[object, Tensor] = {}
        x = cast(Tensor, self.vae.post_quant_conv(latents)).contiguous(memory_format=torch.channels_last_3d)
        strip = None if self.sharing is None else self.sharing.strip(latents)
        size = tuple(latents.shape)
        for start, end in [(0, 1), *((n, n + self.chunk) for n in range(1, x.shape[2], self.chunk))]:
            with self._sizes.of("decode", size):
                frames = self._decode(x[:, :, start:end], past, strip, first=start == 0)
            yield frames

    def decode(self, latents: Tensor) -> Tensor:
        """The whole video [batch, 3, 4 * (latent frames - 1) + 1, height, width] in -1..1."""
        parts: list[Tensor] = []
        for part in self.chunks(latents):
            parts.append(part)
            if self.listener is not None:
                self.listener(part, 4 * (latents.shape[2] - 1) + 1)
        return torch.cat(parts, dim=2)

    def _past(self, past: dict[object, Tensor], key: object, x: Tensor, channels: int) -> Tensor:
        known = past.get(key)
        if known is None:  # before the first frame stand zeros, which is what the stock block pads with
            b, _, _, h, w = x.shape
            known = torch.zeros(b, channels, _KEEP, h, w, dtype=x.dtype, device=x.device)
            known = known.contiguous(memory_format=torch.channels_last_3d)
        return known

    def _block(self, x: Tensor, past: dict[object, Tensor], block: Any) -> Tensor:
        one, two = (block, 1), (block, 2)
        past1 = self._past(past, one, x, block.in_dim)
        past2 = self._past(past, two, x, block.out_dim)
        x, past[one], past[two] = self._residual(x, past1, past2, block)
        return x

    def _upsample(self, x: Tensor, past: dict[object, Tensor], resample: Any, first: bool) -> Tensor:
        if resample.mode == "upsample3d" and not first:
            before = self._past(past, resample, x, x.shape[1])
            x, past[resample] = self._double_time(x, before, resample.time_conv)
        return self._double_space(x, *self._phases[resample])

    def _decode(self, x: Tensor, past: dict[object, Tensor], strip: Strip | None, *, first: bool) -> Tensor:
        decoder = self.vae.decoder
        x = x.contiguous(memory_format=torch.channels_last_3d)
        key = decoder.conv_in
        x, past[key] = self._causal(x, self._past(past, key, x, x.shape[1]), decoder.conv_in)
        middle = decoder.mid_block
        x = self._block(x, past, middle.resnets[0])
        for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
            x = self._block(_attend(x, attention), past, resnet)
        for level, up in enumerate(decoder.up_blocks):
            if strip is not None:
                x = strip.before(x, level)
            for resnet in up.resnets:
                x = self._block(x, past, resnet)
            if up.upsamplers is not None:
                x = self._upsample(x, past, up.upsamplers[0], first)
        key = decoder.conv_out
        y, past[key] = self._head(x, self._past(past, key, x, x.shape[1]), decoder.norm_out, decoder.conv_out)
        return y if strip is None or self.sharing is None else self.sharing.whole(y, strip)


def install(vae: Any, decoder: WanVaeDecoder) -> None:
    """Make ``vae.decode`` use ``decoder`` (untiled, one video at a time as slicing would do it)."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    stock = vae._decode

    def decode(z: Tensor, return_dict: bool = True) -> Any:
        if vae.use_tiling:
            return stock(z, return_dict=return_dict)
        sample = torch.cat([decoder.decode(one) for one in z.split(1)])
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    vae._decode = decode
    vae.triptych_decoder = decoder


def installed(vae: object) -> WanVaeDecoder | None:
    """The decoder that `install` put into ``vae``; None where it did not."""
    return getattr(vae, "triptych_decoder", None)
