"""What only a GPU shows of adapters: compiled, recorded and quantised models go on with them as they are."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from triptych.accel.adapters import write_into
from triptych.accel.compiling import count_compilations
from triptych.accel.plan import accelerate
from triptych.accel.sizes import rehearsing
from triptych.accel.tally import Tally
from triptych.config import Profile

from .test_accel_gpu import BF16, CUDA, relative, wan, wan_forward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCALE = 4.0
"""Changes more than FP8 rounds off."""
LAYERS = ["attn1.to_q", "attn1.to_out.0", "attn2.to_v", "ffn.net.0.proj", "ffn.net.2"]


@pytest.mark.parametrize(("profile", "error"), [("lossless", 3e-2), ("fast", 1.5e-1)])
def test_accelerated_models_take_adapters_without_compiling_anew(profile: Profile, error: float) -> None:
    if profile == "fast":
        pytest.importorskip("torchao")
    torch.set_grad_enabled(False)
    stock, model = wan(), wan()
    for made in (stock, model):
        torch.manual_seed(1)
        made.add_adapter(LoraConfig(r=8, target_modules=LAYERS, init_lora_weights=False), adapter_name="fox")
        made.to(CUDA, BF16)
    adapters, tally = write_into(model), Tally()
    accelerate({"transformer": model}, device=CUDA, dtype=BF16, profile=profile)
    count_compilations(tally)
    with rehearsing():
        plain = [wan_forward(model, time=time) for time in (500.0, 400.0, 500.0)][-1]  # often enough to be recorded
    known = tally.compilations
    stock.disable_adapters()
    assert relative(plain, wan_forward(stock)) < error
    stock.enable_adapters()
    stock.set_adapters("fox", SCALE)
    with_it = wan_forward(stock)
    for _ in range(2):
        adapters.choose((("fox", SCALE),))
        assert 2 * relative(wan_forward(model), with_it) < relative(plain, with_it)
        adapters.choose(())
        assert torch.equal(wan_forward(model), plain)
    assert tally.compilations == known
