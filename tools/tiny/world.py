"""The world of the clips: one coloured shape on a plain background, and how it moves, grows or turns.

A combination is a row of six integers, one for each of FIELDS. All combinations stand in one table; one in thirteen is
held out, so that a judged prompt asks for something that no training clip has shown.
"""

import math

import torch
from torch import Tensor

from tools.tiny.recipe import Clip

FIELDS = ("shape", "colour", "background", "motion", "size", "speed")
SHAPES = ("circle", "square", "triangle", "star")
PALETTE = {
    "red": (214, 32, 40),
    "green": (36, 158, 66),
    "blue": (42, 78, 214),
    "yellow": (248, 224, 52),
    "orange": (250, 126, 22),
    "purple": (134, 46, 178),
    "white": (244, 244, 244),
    "black": (16, 16, 16),
    "gray": (128, 128, 128),
}
BACKGROUNDS = tuple(PALETTE)
COLOURS = BACKGROUNDS[:-1]  # grey is a background only
MOTIONS = ("right", "left", "up", "down", "still", "growing", "shrinking", "rotating")
SIZES = ("small", "medium", "large")
SPEEDS = ("slow", "normal", "fast")
VALUES = (SHAPES, COLOURS, BACKGROUNDS, MOTIONS, SIZES, SPEEDS)
COUNTS = tuple(len(v) for v in VALUES)

_RIGHT, _LEFT, _UP, _DOWN, _STILL, _GROWING, _SHRINKING, _ROTATING = range(len(MOTIONS))

# By shape: corners of the outline, distance of its notches (edge middles) and tips from the centre in radii.
_CORNERS = (64, 4, 3, 5)
_TIP = (1.0, 1.2, 1.3, 1.35)
_NOTCH = (math.cos(math.pi / 64), 1.2 * math.cos(math.pi / 4), 1.3 * 0.5, 1.35 * 0.44)
_FACING = (0.0, math.pi / 4, -math.pi / 2, -math.pi / 2)  # a square rests on its side, the others point up

_RADIUS = ((0.115, 0.135), (0.155, 0.180), (0.200, 0.240))  # of the shorter side, by size
_TRAVEL = ((0.22, 0.32), (0.38, 0.50), (0.56, 0.72))  # of the side moved along, by speed
_TURN = (math.radians(60), math.radians(140))
_SCALES = {_GROWING: (0.65, 1.35), _SHRINKING: (1.35, 0.65)}
_COLOUR_NOISE = 4.0  # of 255


def combinations(*, held_out: bool) -> Tensor:
    """All rows of attributes that can be shown [n, 6], either those never trained on or the others."""
    grid = torch.cartesian_prod(*(torch.arange(n) for n in COUNTS))
    shape, colour, background, motion = grid.T[:4]
    visible = colour != background
    tells = ~((shape == SHAPES.index("circle")) & (motion == _ROTATING))  # a turning circle looks still
    hidden = (3 * shape + 5 * colour + 7 * background + 2 * motion) % 13 == 0
    return grid[visible & tells & (hidden == held_out)]


def _between(low_high: Tensor, generator: torch.Generator) -> Tensor:
    low, high = low_high.unbind(-1)
    return low + (high - low) * torch.rand(low.shape, generator=generator, device=low.device)


def _signed_distance(x: Tensor, y: Tensor, tip: Tensor, notch: Tensor, corners: Tensor, angle: Tensor) -> Tensor:
    """Distance in pixels from a regular outline around the origin, negative inside; exact near the edges.

    The plane is folded into half a corner's wedge, in which the outline is one segment from tip to notch.
    """
    half = math.pi / corners
    around = torch.remainder(torch.atan2(y, x) - angle + half, 2 * half) - half
    distance = torch.hypot(x, y)
    along, across = distance * around.cos(), distance * around.abs().sin()
    normal_x, normal_y = notch * half.sin(), tip - notch * half.cos()
    return ((along - tip) * normal_x + across * normal_y) / torch.hypot(normal_x, normal_y)


def _course(
    room: float, reach: Tensor, travel: Tensor, sign: Tensor, time: Tensor, generator: torch.Generator
) -> Tensor:
    """Positions [n, frames] along an axis of `room` pixels for shapes that reach `reach` pixels from their centre."""
    reach = reach.clamp(max=room / 2 - 1)
    free = room - 2 * reach
    travel = torch.minimum(travel * room, free) * sign.abs()
    start = reach + torch.rand(reach.shape, generator=generator, device=reach.device) * (free - travel)
    progress = torch.where(sign[:, None] < 0, 1 - time, time)
    return start[:, None] + travel[:, None] * progress


def render(rows: Tensor, scene: Clip, generator: torch.Generator, window: Clip | None = None) -> Tensor:
    """Clips [n, 3, frames, height, width] in [-1, 1] of the combinations `rows` [n, 6], on the rows' device.

    `window` cuts that many frames and pixels out of each scene, near the shape.
    """
    device, count = rows.device, len(rows)
    cut = window or scene
    shape, _, _, motion, size, speed = rows.T

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, device=device)

    def lookup(values: object, index: Tensor) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)[index]

    if scene.frames == 1:
        time = uniform()[:, None]
    else:
        first = uniform(0.0, (scene.frames - cut.frames) / (scene.frames - 1))
        time = first[:, None] + torch.arange(cut.frames, device=device) / (scene.frames - 1)

    begin, end = lookup([_SCALES.get(m, (1.0, 1.0)) for m in range(len(MOTIONS))], motion).unbind(-1)
    radius = _between(lookup(_RADIUS, size), generator) * min(scene.height, scene.width)
    tip, notch = lookup(_TIP, shape) * radius, lookup(_NOTCH, shape) * radius
    reach = tip * torch.maximum(begin, end) + 1
    travel = _between(lookup(_TRAVEL, speed), generator)
    sideways = (motion == _RIGHT).float() - (motion == _LEFT).float()
    downwards = (motion == _DOWN).float() - (motion == _UP).float()
    centre_x = _course(scene.width, reach, travel, sideways, time, generator)
    centre_y = _course(scene.height, reach, travel, downwards, time, generator)
    turn = uniform(*_TURN) * (uniform() - 0.5).sign() * (motion == _ROTATING)
    angle = lookup(_FACING, shape)[:, None] + turn[:, None] * time

    left = top = torch.zeros(count, device=device)
    if window is not None:
        left = (centre_x.mean(1) - cut.width * uniform(0.15, 0.85)).clamp(0, scene.width - cut.width).round()
        top = (centre_y.mean(1) - cut.height * uniform(0.15, 0.85)).clamp(0, scene.height - cut.height).round()

    def spread(v: Tensor) -> Tensor:
        return v.reshape(*v.shape, *([1] * (4 - v.dim())))  # to [n, frames, height, width]

    x = torch.arange(cut.width, device=device) + 0.5 + spread(left[:, None] - centre_x)
    y = torch.arange(cut.height, device=device)[:, None] + 0.5 + spread(top[:, None] - centre_y)
    scale = begin[:, None] + (end - begin)[:, None] * time
    tip, notch = spread(tip[:, None] * scale), spread(notch[:, None] * scale)
    inside = -_signed_distance(x, y, tip, notch, spread(lookup(_CORNERS, shape)), spread(angle))
    cover = (inside + 0.5).clamp(0, 1)[:, None]
    back, front = (_paint(rows[:, FIELDS.index(f)], generator) for f in ("background", "colour"))
    return back + (front - back) * cover


def _paint(colour: Tensor, generator: torch.Generator) -> Tensor:
    """Colours [n, 3, 1, 1, 1] in [-1, 1], each a little off its palette entry."""
    palette = torch.tensor(list(PALETTE.values()), device=colour.device, dtype=torch.float32)
    noise = torch.rand(len(colour), 3, generator=generator, device=colour.device) * 2 - 1
    rgb = (palette[colour] + noise * _COLOUR_NOISE).clamp(0, 255)
    return (rgb / 127.5 - 1)[:, :, None, None, None]
