"""Compilations are counted, and compiled code is only run from a folder that nobody else can write."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from triptych.accel.compiling import Overflow, allow_many_graphs, count_compilations, keep_graphs_in
from triptych.accel.plan import compile_blocks
from triptych.accel.sizes import Sizes, rehearsing
from triptych.accel.tally import Tally
from triptych.accel.wan_vae import WanVaeDecoder
from triptych.errors import ConfigError
from triptych.pipeline.suspended import suspendable


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "before")  # put back afterwards


@pytest.mark.usefixtures("environment")
def test_graphs_and_kernels_are_kept_below_the_folder(tmp_path: Path) -> None:
    unused, used = (tmp_path / "cache" / "inductor" / name for name in ("unused", "used"))
    unused.parent.mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    for file in (unused, used):
        file.write_text("")
    os.utime(unused, (0, 0))
    keep_graphs_in(tmp_path / "cache")
    assert used.exists()
    assert not unused.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("environment")
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        keep_graphs_in(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == "before"


def test_each_shape_is_one_compilation_and_a_known_one_none() -> None:
    tally = Tally()
    count_compilations(tally)
    begun: list[int] = []
    tally.compiling = lambda: begun.append(tally.compilations)
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(3))
    double(torch.ones(3))
    assert tally.compilations == 1
    double(torch.ones(5))
    assert tally.compilations == 2
    assert tally.compile_seconds > 0
    assert begun == [0, 1], "each is told of before it is done"


def graphless(tally: Tally, sizes: list[int], call: Any) -> list[bool]:
    """Whether each call of a size, all of which are right, was computed without a graph."""
    found: list[bool] = []
    for size in sizes:
        before = tally.uncompiled
        assert torch.equal(call(torch.ones(size)), torch.full((size,), 2.0))
        found.append(tally.uncompiled > before)
    return found


@pytest.fixture
def two_graphs() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("two_graphs")
def test_a_shape_too_many_is_computed_without_a_graph_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    double = Overflow("double", tally).compiled(lambda x: x * 2, backend="eager", dynamic=False)
    sizes = [3, 4, 5, 6, 3, 5, 4]
    with caplog.at_level(logging.WARNING, "triptych"):
        assert graphless(tally, sizes, double) == [False, False, True, True, False, True, False]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("triptych")]
    assert len(told) == 2
    assert "double" in told[0]
    assert "5" in told[0]


@pytest.mark.usefixtures("two_graphs")
def test_what_the_compiler_fails_at_is_computed_without_it_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Symptom: in a container without a C compiler every request failed."""
    tried: list[int] = []

    def no_compiler(graph: Any, inputs: list[Tensor]) -> Any:
        tried.append(inputs[0].shape[0])
        if inputs[0].shape[0] != 4:
            raise FileNotFoundError("no gcc")
        return graph.forward

    tally = Tally()
    double = Overflow("double", tally).compiled(lambda x: x * 2, backend=no_compiler, dynamic=False)
    with caplog.at_level(logging.WARNING, "triptych"):
        assert graphless(tally, [3, 5, 3, 5, 4, 4], double) == [True, True, True, True, False, False]
    assert tried == [3, 5, 4]  # what it failed at is not tried again
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("triptych")]
    assert told.startswith("double: the compiler fails")
    assert "no gcc" in told


@pytest.mark.usefixtures("two_graphs")
def test_a_gpu_that_is_full_is_no_failure_of_the_compiler() -> None:
    def full(graph: Any, inputs: list[Tensor]) -> Any:
        raise torch.OutOfMemoryError("full")

    tally = Tally()
    double = Overflow("double", tally).compiled(lambda x: x * 2, backend=full, dynamic=False)
    with pytest.raises(torch.OutOfMemoryError):
        double(torch.ones(3))
    assert tally.uncompiled == 0


@pytest.mark.usefixtures("two_graphs")
def test_an_error_inside_a_graph_is_not_taken_for_a_shape_too_many() -> None:
    tally = Tally()

    def broken(x: Tensor) -> Tensor:
        return x @ torch.ones(2, 2)

    double = Overflow("broken", tally).compiled(broken, backend="eager", dynamic=False)
    with pytest.raises(Exception, match=r"mat1|size"):
        double(torch.ones(1, 3))
    assert tally.uncompiled == 0


@pytest.mark.usefixtures("two_graphs")
def test_a_model_with_compiled_blocks_serves_any_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=16, num_layers=2, text_dim=8, freq_dim=16
    ).eval()
    stock = [forward(model, size) for size in range(2, 6)]
    monkeypatch.setattr(torch, "compile", eagerly(torch.compile))
    monkeypatch.setattr("triptych.accel.plan.allow_many_graphs", lambda: None)
    tally, sizes = Tally(), Sizes()
    compile_blocks(model, sizes, tuned=False, overflow=Overflow("transformer", tally))
    sizes.install("transformer", model)
    with rehearsing():
        assert all(torch.equal(forward(model, size), made) for size, made in zip(range(2, 6), stock, strict=True))
    assert tally.uncompiled == 2 * 2, "two blocks, for two sizes"


def eagerly(really: Any) -> Any:
    """`torch.compile` whose graphs are run as they are."""
    return lambda plain, *, options=None, **more: really(plain, backend="eager", **more)


def noting(really: Any, made: list[bool]) -> Any:
    """`torch.compile` that also notes of each graph that is run whether it was made for any size."""

    def compiled(plain: Any, *, dynamic: bool | None, options: Any = None, **more: Any) -> Any:
        def backend(graph: Any, inputs: list[Any]) -> Any:
            def run(*args: Any) -> Any:
                made.append(dynamic is None)
                return graph(*args)

            return run

        return really(plain, backend=backend, dynamic=dynamic, **more)

    return compiled


def test_a_size_that_was_rehearsed_is_computed_by_its_own_graph_whatever_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: the same request gave other bytes after requests of other sizes, since a graph for all sizes had come to
    serve it; and on a server with --warmup each other size waited for graphs of its own."""
    served: list[bool] = []
    monkeypatch.setattr(torch, "compile", noting(torch.compile, served))
    tally = Tally()
    model = small(Sizes(), tally)
    with rehearsing():
        forward(model, 2)
    served.clear()
    for size in (3, 2, 4, 3, 2):
        forward(model, size)
    for_any = [True] * 2  # of two blocks
    for_its_own = [False] * 2
    assert served == [*for_any, *for_its_own, *for_any, *for_any, *for_its_own]
    assert tally.compilations == 2


def small(sizes: Sizes, tally: Tally) -> nn.Module:
    """A model whose blocks are compiled."""
    torch.set_grad_enabled(False)
    torch.compiler.reset()
    allow_many_graphs()
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=16, num_layers=2, text_dim=8, freq_dim=16
    ).eval()
    count_compilations(tally)
    compile_blocks(model, sizes, tuned=False, overflow=Overflow("transformer", tally))
    sizes.install("transformer", model)
    return model


def test_an_upright_video_has_the_graphs_of_one_across(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with --warmup 832x480x81 a request of 480x832x81 waited for the compiler, and the next size again."""
    served: list[bool] = []
    monkeypatch.setattr(torch, "compile", noting(torch.compile, served))
    tally = Tally()
    model = small(Sizes(), tally)
    with rehearsing():
        forward(model, 4, 2)
    known = tally.compilations
    served.clear()
    forward(model, 2, 4)
    assert served == [False, False]
    assert tally.compilations == known
    for size in (3, 5):
        forward(model, size)
    assert tally.compilations == known + 1


def test_what_fails_for_all_sizes_leaves_the_graphs_of_rehearsed_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    really, failing = torch.compile, list[str]()

    def compiled(plain: Any, *, dynamic: bool | None, options: Any = None, **more: Any) -> Any:
        def backend(graph: Any, inputs: list[Any]) -> Any:
            if dynamic is None and failing:
                raise OSError(failing[0])
            return graph

        return really(plain, backend=backend, dynamic=dynamic, **more)

    monkeypatch.setattr(torch, "compile", compiled)
    sizes, tally = Sizes(), Tally()
    double = Overflow("double", tally).compiled_for(lambda x: x * 2, sizes)
    failing.append("no space left on device")
    x = torch.ones(2)
    assert torch.equal(double(x), x * 2)
    assert tally.uncompiled == 1
    with rehearsing(), sizes.of(2):
        double(x)
    double(x)
    assert tally.uncompiled == 1, "the same shape has a graph of its own"


def forward(model: nn.Module, size: int, other: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 16, 1, 2 * size, 2 * other, generator=generator), torch.ones(1, 3, 8)
    return model(latents, torch.tensor([500.0]), text, return_dict=False)[0]


def test_the_decoder_s_blocks_are_whole_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_grad_enabled(False)
    torch.compiler.reset()
    allow_many_graphs()
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    latents = torch.randn(1, 4, 4, 2, 2, generator=torch.Generator().manual_seed(2))
    plain = WanVaeDecoder(vae).decode(latents)
    monkeypatch.setattr(torch, "compile", eagerly(torch.compile))
    tally = Tally()
    count_compilations(tally)
    compiled = WanVaeDecoder(vae, overflow=Overflow("vae", tally), sizes=Sizes())
    assert torch.equal(compiled.decode(latents), plain)
    assert tally.compilations == 0, "a request of a new size would wait for all of them"
    with rehearsing():
        compiled.decode(latents)
    assert tally.compilations > 0
    assert torch.equal(compiled.decode(latents), plain)
    assert tally.uncompiled == 0


def test_the_steps_of_a_request_may_have_as_many_graphs_as_their_thread_says() -> None:
    """Its loop runs in a greenlet, where torch would have eight graphs at most."""
    torch.compiler.reset()
    allow_many_graphs()
    tally = Tally()
    double = Overflow("double", tally).compiled(lambda x: x * 2, backend="eager", dynamic=False)
    sizes = list(range(2, 14))
    assert suspendable(lambda: graphless(tally, sizes, double)).switch() == [False] * len(sizes)
