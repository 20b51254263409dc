"""Which plane is opened and taken, and the books of the pooled one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from triptych.config import TransferConfig
from triptych.errors import ConfigError, TooLarge, TransferError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import DataPlane, Payload, Pull
from triptych.wire.manifest import TensorEntry

MIB = 1 << 20
Open = Callable[..., DataPlane]
Puller = Callable[..., Pull]
Tensors = Callable[[int, int], tuple[torch.Tensor, ...]]
Same = Callable[..., bool]
R = RequestId("r")


def payload(*tensors: torch.Tensor) -> Payload:
    return Payload(tree=b"tree", tensors=tensors)


def zeros(nbytes: int) -> Payload:
    return payload(torch.zeros(nbytes, dtype=torch.uint8))


@pytest.mark.parametrize(("kind", "planes", "taken"), [("auto", ("local", "shm"), "local"), ("shm", ("shm",), "shm")])
def test_a_handoff_to_oneself(
    open_here: Open, pull: Puller, tensors: Tensors, same: Same, kind: str, planes: tuple[str, ...], taken: str
) -> None:
    plane = open_here(kind)
    given = tensors(3, 1000)
    manifest = plane.stage(R, payload(*given))
    assert plane.planes == planes
    assert tuple(locator.plane for locator in manifest.locators) == planes
    got = pull(plane, manifest)
    assert got.plane == taken
    assert same(got.payload.tensors, given)
    got.payload.tensors[1].fill_(7)
    assert same(pull(plane, manifest).payload.tensors, given)


def test_another_life_of_the_same_instance_is_not_oneself(open_here: Open, pull: Puller) -> None:
    old, new = open_here(epoch="life-1"), open_here(epoch="life-2")
    assert pull(new, old.stage(R, zeros(10))).plane == "shm"


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_a_released_copy_cannot_be_pulled(open_here: Open, pull: Puller, kind: str) -> None:
    plane = open_here(kind)
    manifest = plane.stage(R, zeros(1000))
    plane.release([manifest.copy])
    assert plane.used_bytes == 0
    plane.stage(R, payload(torch.full((1000,), 7, dtype=torch.uint8)))
    with pytest.raises(TransferError):
        pull(plane, manifest)


def test_pressure_drops_the_oldest_and_says_so(open_here: Open) -> None:
    plane = open_here(pool_bytes=MIB)
    manifests = [plane.stage(R, zeros(MIB // 4)) for _ in range(6)]
    assert plane.take_dropped() == (manifests[0].copy, manifests[1].copy)
    assert plane.copies() == tuple(manifests[2:])
    assert plane.used_bytes == MIB


def test_a_payload_larger_than_the_pool_is_refused_with_both_sizes(open_here: Open) -> None:
    plane = open_here(pool_bytes=MIB)
    with pytest.raises(TooLarge, match=rf"{MIB + 64}.*{MIB}"):
        plane.stage(R, zeros(MIB + 1))
    assert plane.pool_bytes == MIB
    plane.stage(R, zeros(MIB))


def test_gaps_between_tensors_hold_nothing_of_earlier_requests(open_here: Open, pull: Puller) -> None:
    plane = open_here(pool_bytes=MIB)
    full = plane.stage(R, payload(torch.full((MIB,), 7, dtype=torch.uint8)))
    plane.release([full.copy])
    manifest = plane.stage(R, payload(torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)))
    tensor = pull(plane, manifest).payload.tensors[0]
    assert bytes(tensor.untyped_storage()) == (b"\1" + bytes(63)) * 2


@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry("uint8", (100,), 0, 100),
        TensorEntry("uint8", (10,), 64, 10),
        TensorEntry("uint8", (10,), 1, 10),
        TensorEntry("uint8", (10,), -64, 10),
        TensorEntry("float32", (10,), 0, 10),
        TensorEntry("uint8", (-1, -10), 0, 10),
        TensorEntry("object", (10,), 0, 10),
        TensorEntry("uint8", (2**40, 2**40), 0, 2**80 % 2**63),
    ],
    ids=str,
)
def test_an_impossible_tensor_in_a_manifest_is_refused(open_here: Open, pull: Puller, entry: TensorEntry) -> None:
    plane = open_here()
    manifest = plane.stage(R, zeros(10))
    with pytest.raises(TransferError, match=r"tensor 0 .* is impossible"):
        pull(plane, msgspec.structs.replace(manifest, tensors=(entry,)))


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_a_cancelled_or_late_pull_is_an_error(open_here: Open, kind: str) -> None:
    plane = open_here(kind)
    manifest = plane.stage(R, zeros(10))
    with pytest.raises(TransferError, match="cancelled"):
        plane.pull(manifest, deadline=time.monotonic() + 9, cancelled=lambda: True)
    with pytest.raises(TransferError, match="deadline"):
        plane.pull(manifest, deadline=time.monotonic() - 1, cancelled=lambda: False)


def test_a_tensor_that_cannot_cross_is_named(open_here: Open) -> None:
    plane = open_here()
    with pytest.raises(TransferError, match=r"tensor 1 is torch\.float32, torch\.sparse_coo"):
        plane.stage(R, payload(torch.zeros(1), torch.eye(2).to_sparse()))
    assert plane.used_bytes == 0


def test_many_threads_at_once_keep_the_books_right(open_here: Open, pull: Puller) -> None:
    plane = open_here(pool_bytes=4 * MIB)
    wrong: list[object] = []

    def work(number: int) -> None:
        for size in range(1, 40):
            value = (number * 40 + size) % 251
            manifest = plane.stage(R, payload(torch.full((size * 1000,), value, dtype=torch.uint8)))
            got = pull(plane, manifest).payload.tensors[0]
            if got.min() != value or got.max() != value:
                wrong.append((number, size))
            plane.release([manifest.copy])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert plane.used_bytes == 0
    assert plane.take_dropped() == ()


def test_a_pull_for_which_there_is_no_memory_says_so_and_nothing_of_the_copy(
    open_here: Open, pull: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = open_here("shm")
    there = plane.stage(R, zeros(1000))
    empty = torch.empty

    def refuse(*size: Any, **more: Any) -> torch.Tensor:
        if size == (there.nbytes,):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **more)

    with monkeypatch.context() as full:
        full.setattr(torch, "empty", refuse)
        with pytest.raises(MemoryError, match=f"handoff of {there.nbytes} bytes"):
            pull(plane, there)
    assert pull(plane, there).nbytes == there.nbytes


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_a_closed_plane_leaves_no_thread_of_large_copies(
    pull: Puller, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    before = set(threading.enumerate())
    config = TransferConfig(kind=kind, pool_bytes=16 * MIB)  # type: ignore[arg-type]
    plane = open_plane(config, InstanceId("i"), Epoch("e"), "cpu")
    assert pull(plane, plane.stage(R, zeros(15 * MIB))).payload.tensors[0].count_nonzero() == 0
    assert 0 < len(set(threading.enumerate()) - before) < 4
    plane.close()
    assert set(threading.enumerate()) <= before


def test_memory_that_cannot_be_had_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="disagg-transfer-pool-size"):
        open_plane(TransferConfig(kind="shm", pool_bytes=1 << 60), InstanceId("i"), Epoch("e"), "cpu")


def test_a_pool_is_page_locked_for_its_own_gpu_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At another GPU the call would open that one, and take memory of it."""
    at: list[Any] = [torch.device("cuda:0")]
    calls: list[tuple[str, Any]] = []

    @contextlib.contextmanager
    def device(other: Any) -> Generator[None]:
        at.append(other)
        yield
        at.pop()

    cudart = SimpleNamespace(
        cudaHostRegister=lambda *_: calls.append(("lock", at[-1])) or 0,
        cudaHostUnregister=lambda *_: calls.append(("unlock", at[-1])) or 0,
    )
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    open_plane(TransferConfig(kind="shm", pool_bytes=16 * MIB), InstanceId("i"), Epoch("e"), "cuda:1").close()
    assert calls == [("lock", torch.device("cuda:1")), ("unlock", torch.device("cuda:1"))]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_tensors_of_a_gpu_come_back_in_pinned_memory(tensors: Tensors, same: Same, kind: str, pull: Puller) -> None:
    plane = open_plane(TransferConfig(kind=kind, pool_bytes=16 * MIB), InstanceId("i"), Epoch("e"), "cuda:0")  # type: ignore[arg-type]
    given = tensors(3, MIB)
    got = pull(plane, plane.stage(R, payload(*(tensor.cuda() for tensor in given)))).payload.tensors
    assert all(tensor.is_pinned() for tensor in got if tensor.numel())
    assert same(got, given)
    plane.close()
