"""Muon for matrices, AdamW for the rest, under one learning-rate curve."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def rate_factor(progress: float, warm_up: float = 0.03, floor: float = 0.01) -> float:
    """Share of the peak learning rate at `progress` in [0, 1] of a stage: linear warm-up, then half a cosine."""
    if progress < warm_up:
        return max(progress / warm_up, 0.02)
    fall = min(1.0, (progress - warm_up) / (1 - warm_up))
    return floor + (1 - floor) * (1 + math.cos(math.pi * fall)) / 2


def orthogonalised(stack: Tensor, rounds: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: Newton-Schulz rounds on a stack [n, rows <= columns].

    Coefficients of K. Jordan, Muon (https://kellerjordan.github.io/posts/muon), tuned for speed rather than precision.
    """
    x = stack.bfloat16() if stack.is_cuda else stack
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. Convolution kernels count as [out, in * taps]; matrices of equal size are worked on in
    one stack, since one by one the launches would take longer than the step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in params]
            for p in params:
                if "velocity" not in self.state[p]:
                    self.state[p]["velocity"] = torch.zeros_like(p)
            velocities = [self.state[p]["velocity"] for p in params]
            torch._foreach_lerp_(velocities, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, velocities, group["momentum"])  # Nesterov
            if group["decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            by_size: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p, direction in zip(params, ahead, strict=True):
                by_size[p.shape].append((p, direction.reshape(len(p), -1)))
            for members in by_size.values():
                self._apply(members, group["lr"])

    @staticmethod
    def _apply(members: list[tuple[nn.Parameter, Tensor]], lr: float) -> None:
        stack = torch.stack([direction for _, direction in members])
        tall = stack.shape[1] > stack.shape[2]
        turned = orthogonalised(stack.mT if tall else stack)
        moves = (turned.mT if tall else turned).unbind()
        gain = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
        torch._foreach_add_(
            [p for p, _ in members],
            [move.reshape(p.shape) for (p, _), move in zip(members, moves, strict=True)],
            alpha=-lr * gain,
        )


class Optimizers:
    """`muon_rate(name, parameter)` gives Muon's peak rate, 0 where AdamW is to take the parameter."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        muon_rate: Callable[[str, nn.Parameter], float],
        adam_rate: float,
        *,
        decay: float = 0.0,
    ) -> None:
        groups: dict[float, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in named:
            groups[muon_rate(name, parameter)].append(parameter)
        self._peaks: list[tuple[torch.optim.Optimizer, float]] = []
        for rate, members in groups.items():
            if rate:
                self._peaks.append((Muon(members, rate, decay=decay), rate))
            else:
                fused = members[0].is_cuda
                adam = torch.optim.AdamW(members, adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
                self._peaks.append((adam, adam_rate))
        self._all = [p for members in groups.values() for p in members]

    def zero_grad(self) -> None:
        for optimizer, _ in self._peaks:
            optimizer.zero_grad(set_to_none=True)

    def step(self, progress: float) -> None:
        """One update at the rate due at `progress` of the stage, with the gradients' common norm clipped to 1."""
        nn.utils.clip_grad_norm_(self._all, 1.0)
        for optimizer, peak in self._peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_factor(progress)
            optimizer.step()
