"""Says what a clip shows by measuring it: no network, only colours, areas, centroids, overlap with ideal outlines."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tools.tiny import captions
from tools.tiny.recipe import Clip
from tools.tiny.world import BACKGROUNDS, COLOURS, FIELDS, MOTIONS, PALETTE, SHAPES, combinations, render

JUDGED = ("background", "colour", "shape", "motion")
_GRID = 48
_HALF_WIDTH = 1.9
"""The grid on which outlines are compared reaches this many square roots of the shape's area from its centroid."""
_ANGLE_STEP = 3
_SYMMETRY = {"circle": 3, "square": 90, "triangle": 120, "star": 72}  # degrees after which an outline repeats
_MOVED = 0.08  # of the clip's side
_SCALED = 1.5  # ratio of areas
_TURNED = 25  # degrees


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a clip shows; None where it cannot be told. `overlap` is the mean IoU with the best ideal outline."""

    background: str
    colour: str | None = None
    shape: str | None = None
    motion: str | None = None
    overlap: float = 0.0


@dataclass(frozen=True)
class Truth:
    """What clips should show, by field of JUDGED."""

    values: dict[str, list[str]]

    @classmethod
    def of_rows(cls, rows: Tensor) -> "Truth":
        names = {"background": BACKGROUNDS, "colour": COLOURS, "shape": SHAPES, "motion": MOTIONS}
        return cls({f: [names[f][i] for i in rows[:, FIELDS.index(f)].tolist()] for f in JUDGED})


def _nearest(rgb: NDArray[np.float32], names: Sequence[str]) -> str:
    palette = np.array([PALETTE[name] for name in names]) / 255
    return names[int(((palette - rgb) ** 2).sum(1).argmin())]


@cache
def _outlines() -> tuple[NDArray[np.float32], list[str], NDArray[np.float64]]:
    """Ideal shapes of unit area at all angles: masks [n, grid * grid], names, and angles in degrees."""
    masks, names, angles = [], [], []
    still, medium = MOTIONS.index("still"), 1
    for shape, name in enumerate(SHAPES):
        row = torch.tensor([[shape, COLOURS.index("white"), BACKGROUNDS.index("black"), still, medium, 0]])
        picture = render(row, Clip(1, 256, 256), torch.Generator().manual_seed(0))[0, 0, 0].numpy() > 0
        for angle in range(0, _SYMMETRY[name], _ANGLE_STEP):
            masks.append(_on_grid(picture, angle))
            names.append(name)
            angles.append(angle)
    return np.stack(masks), names, np.array(angles, float)


def _on_grid(mask: NDArray[np.bool_], angle: float = 0.0) -> NDArray[np.float32]:
    """A mask moved to its centroid, scaled to unit area and turned by `angle` degrees, as a flat row."""
    ys, xs = np.nonzero(mask)
    unit = np.sqrt(len(ys)) * _HALF_WIDTH / 2
    line = (np.arange(_GRID) + 0.5) * 2 / _GRID - 1
    x, y = np.meshgrid(line * unit, line * unit)
    c, s = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    column = np.rint(xs.mean() + c * x + s * y).astype(int)
    line_no = np.rint(ys.mean() - s * x + c * y).astype(int)
    inside = (column >= 0) & (column < mask.shape[1]) & (line_no >= 0) & (line_no < mask.shape[0])
    out = np.zeros((_GRID, _GRID), np.float32)
    out[inside] = mask[line_no[inside], column[inside]]
    return out.ravel()


def look(clip: ArrayLike) -> Sight:
    """`clip` [frames, height, width, 3] in [0, 1]."""
    frames = np.asarray(clip, np.float32)
    border = [frames[:, :2], frames[:, -2:], frames[:, :, :2], frames[:, :, -2:]]
    back = np.median(np.concatenate([b.reshape(-1, 3) for b in border]), 0)
    background = _nearest(back, BACKGROUNDS)
    distance = np.linalg.norm(frames - back, axis=-1)
    different = distance > 0.2
    if different.sum() < 30 * len(frames):
        return Sight(background=background)
    front = np.median(frames[distance > 0.6 * np.quantile(distance[different], 0.9)], 0)
    colour = _nearest(front, COLOURS)
    towards = front - back
    masks = (frames - back) @ towards > 0.5 * (towards @ towards)
    areas = masks.sum((1, 2)).astype(float)
    if areas.min() < 12:
        return Sight(background=background, colour=colour)

    ideal, names, angles = _outlines()
    seen = np.stack([_on_grid(mask) for mask in masks])
    common = seen @ ideal.T
    overlap = common / (seen.sum(1)[:, None] + ideal.sum(1)[None] - common)
    by_shape = {name: overlap[:, [n == name for n in names]] for name in SHAPES}
    scores = {name: float(part.max(1).mean()) for name, part in by_shape.items()}
    shape = max(scores, key=lambda name: scores[name])
    facing = angles[[n == shape for n in names]][by_shape[shape].argmax(1)]
    motion = _motion(masks, areas, facing, _SYMMETRY[shape]) if len(frames) > 1 else None
    return Sight(background=background, colour=colour, shape=shape, motion=motion, overlap=scores[shape])


def _motion(masks: NDArray[np.bool_], areas: NDArray[np.float64], facing: NDArray[np.float64], symmetry: int) -> str:
    height, width = masks.shape[1:]
    x = (masks.sum(1) * np.arange(width)).sum(1) / areas / width
    y = (masks.sum(2) * np.arange(height)).sum(1) / areas / height
    ends = max(1, len(masks) // 8)

    def change(values: NDArray[np.float64]) -> float:
        return float(values[-ends:].mean() - values[:ends].mean())

    right, down, growth = change(x), change(y), change(np.log(areas))
    if max(abs(right), abs(down)) > _MOVED:
        if abs(right) > abs(down):
            return "right" if right > 0 else "left"
        return "down" if down > 0 else "up"
    if abs(growth) > np.log(_SCALED):
        return "growing" if growth > 0 else "shrinking"
    turned = np.unwrap(facing, period=symmetry)
    return "rotating" if abs(turned[-1] - turned[0]) > _TURNED else "still"


def _told_by(sights: Sequence[Sight]) -> list[str]:
    return [f for f in JUDGED if f != "motion" or any(s.motion for s in sights)]


def accuracy(sights: Sequence[Sight], truth: Truth) -> dict[str, float]:
    """Share of clips that show what they should, by field and for all fields; motion only where a clip can move."""
    fields = _told_by(sights)
    right = {f: [getattr(s, f) == want for s, want in zip(sights, truth.values[f], strict=True)] for f in fields}
    shares = {f: round(float(np.mean(hits)), 4) for f, hits in right.items()}
    return shares | {
        "all": round(float(np.mean(np.all(list(right.values()), 0))), 4),
        "outline_overlap": round(float(np.mean([s.overlap for s in sights])), 4),
    }


def confusions(sights: Sequence[Sight], truth: Truth) -> dict[str, int]:
    """Count of each mistake, such as "shape star seen as square"."""
    counts: dict[str, int] = {}
    for field in _told_by(sights):
        for sight, want in zip(sights, truth.values[field], strict=True):
            if (got := getattr(sight, field)) != want:
                key = f"{field} {want} seen as {got}"
                counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def prompts(count: int, seed: int) -> tuple[list[str], Truth]:
    """Complete captions of combinations that training never showed."""
    rng = random.Random(seed)
    table = combinations(held_out=True)
    rows = table[torch.tensor([rng.randrange(len(table)) for _ in range(count)])]
    return [captions.write(rng, tuple(row), complete=True).text for row in rows.tolist()], Truth.of_rows(rows)
