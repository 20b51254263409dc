"""FP8 attention is chosen where it works, and compiles no graph for each size; FlashAttention-3 is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triptych.accel import attention, flash3, plan
from triptych.accel.compiling import Overflow, count_compilations
from triptych.accel.plan import Technique, accelerate
from triptych.accel.sizes import Sizes, rehearsing
from triptych.accel.tally import Tally
from triptych.errors import ConfigError

CPU = torch.device("cpu")
NONE_BUILT = "Triton builds no kernels here: Failed to find C compiler"


class Hopper:
    """A machine with FlashAttention-3, whose FP8 kernel takes certain widths of heads; it computes on the CPU."""

    def __init__(self) -> None:
        self.widths = {64, 128}
        self.lacking = ""
        self.quantising: list[Sizes] = []

    def fp8(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        if q.shape[-1] not in self.widths:
            raise RuntimeError("FP8 FlashAttention-3 takes no heads of that width\nException raised from mha_fwd")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal).transpose(1, 2)

    def compile_quantising(self, overflow: Overflow, sizes: Sizes) -> None:
        self.quantising.append(sizes)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    torch.set_grad_enabled(False)
    made = Hopper()
    monkeypatch.setattr(attention, "present", lambda _: ("flash3", "native", "flash3-fp8"))
    monkeypatch.setattr(attention, "_measure", lambda name, *_: {"flash3": 0.001, "native": 0.002}[name])
    monkeypatch.setattr(plan, "_lacking", lambda _: made.lacking)
    monkeypatch.setattr(plan, "_kernels", lambda *_, **__: [])
    monkeypatch.setattr(flash3, "flash3_fp8", made.fp8)
    monkeypatch.setattr(flash3, "compile_quantising", made.compile_quantising)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a Hopper")
    return made


def attention_of(width: int = 64, **settings: Any) -> Technique:
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=width, ffn_dim=32, num_layers=1, text_dim=32, freq_dim=32
    )
    given: Any = {"profile": "fast", "dtype": torch.bfloat16} | settings
    told = {t.name: t for t in accelerate({"transformer": model}, device=CPU, **given)}
    chosen = told["transformer: attention"]
    assert attention.in_use(model) == chosen.why.partition(",")[0]
    return chosen


@pytest.mark.usefixtures("hopper")
def test_profile_fast_takes_fp8_attention_where_it_works() -> None:
    assert attention_of().why == "flash3-fp8, requested"


@pytest.mark.usefixtures("hopper")
def test_profile_fast_leaves_out_fp8_attention_that_does_not_take_the_models_heads() -> None:
    """Symptom: the server started, and each request failed."""
    assert attention_of(32).why == (
        "flash3, fastest of 2 at 32768 tokens (flash3 1.00 ms, native 2.00 ms)"
        "; not flash3-fp8: FP8 FlashAttention-3 takes no heads of that width"
    )


def test_profile_fast_leaves_out_fp8_attention_where_no_kernels_are_built(hopper: Hopper) -> None:
    """Symptom: without a C compiler each request failed."""
    hopper.lacking = NONE_BUILT
    assert attention_of().why.endswith(f"; not flash3-fp8: {NONE_BUILT}")
    assert not hopper.quantising


@pytest.mark.parametrize("profile", ["stock", "lossless", "fast"])
def test_fp8_attention_that_was_asked_for_is_refused_where_it_does_not_work(hopper: Hopper, profile: str) -> None:
    assert attention_of(profile=profile, backend="flash3-fp8").why == "flash3-fp8, requested"
    with pytest.raises(ConfigError, match=r"attention-backend='flash3-fp8': .* 2 heads of 32 here: FP8 Flash.* width$"):
        attention_of(32, profile=profile, backend="flash3-fp8")
    hopper.lacking = NONE_BUILT
    told = attention_of(profile=profile, backend="flash3-fp8").why
    assert told == f"flash3-fp8, requested; quantises without compiled kernels: {NONE_BUILT}"


@pytest.fixture
def quantising(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sizes], tuple[Tally, Callable[[Tensor], Any]]]:
    """How FP8 attention quantises tensors of certain sizes; the compiler's front end is at work."""
    really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda plain, **options: really(plain, backend="eager", **options))
    monkeypatch.setattr(flash3, "_quantising", None)
    torch.compiler.reset()

    def made(sizes: Sizes) -> tuple[Tally, Callable[[Tensor], Any]]:
        tally = Tally()
        count_compilations(tally)
        flash3.compile_quantising(Overflow("transformer", tally), sizes)
        quantise: Any = flash3._quantising  # pyright: ignore[reportPrivateUsage]
        return tally, quantise

    return made


@pytest.mark.parametrize(("rehearsed", "compilations"), [((), 2), ((4,), 2), ((4, 5), 3)])
def test_quantising_compiles_for_what_was_rehearsed_and_twice_at_most_for_all_else(
    quantising: Callable[[Sizes], tuple[Tally, Callable[[Tensor], Any]]], rehearsed: tuple[int, ...], compilations: int
) -> None:
    """Symptom: without --warmup a request of a new size waited for the compiler, whatever sizes came before it."""
    sizes = Sizes()
    tally, quantise = quantising(sizes)
    for tokens in (*rehearsed, *range(4, 10)):
        x = torch.randn(1, tokens, 2, 8)
        with rehearsing() if tokens in rehearsed else nullcontext(), sizes.of(tokens):
            small, descale = quantise(x)
        assert torch.allclose(small.float() * descale[:, None, :, None], x, rtol=0.07, atol=1e-2)
    assert tally.compilations == compilations


def test_what_the_compiler_fails_at_is_quantised_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("no compiler")

    really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda plain, **options: really(plain, backend=fails, **options))
    monkeypatch.setattr(flash3, "_quantising", None)
    torch.compiler.reset()
    tally = Tally()
    with caplog.at_level(logging.WARNING):
        flash3.compile_quantising(Overflow("transformer: FP8 attention", tally), Sizes())
        small, descale = flash3._quantising(torch.ones(1, 4, 2, 8))  # pyright: ignore
    assert (small.dtype, descale.shape) == (torch.float8_e4m3fn, (1, 2))
    assert tally.uncompiled == 1
    assert "transformer: FP8 attention: the compiler fails" in caplog.text
