"""GPU memory that another process can map or an adapter can reach, by NVIDIA's own bindings of the CUDA runtime.

torch can share its tensors between processes too, but keeps the books of that in named shared memory, which a killed
process leaves behind, and its allocator moves memory that is in use by no tensor. This memory is a plain allocation.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, Protocol

import torch

from triptych.errors import ConfigError

HANDLE_BYTES: Final = 64
"""Of what names an allocation to other processes."""
_ALIGNED: Final = 256


class GpuMemoryError(Exception):
    """CUDA refused; its words."""


class GpuMemory(Protocol):
    """The memory of one GPU, by address. Thread-safe."""

    device: torch.device

    def allocate(self, nbytes: int) -> int:
        """Address of new memory. Raises `GpuMemoryError`."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        ...

    def export(self, address: int) -> bytes:
        """The handle by which other processes map an allocation. Raises `GpuMemoryError`."""
        ...

    def map(self, handle: bytes) -> tuple[int, int]:
        """Where the allocation of another process is from now on, and its true size in bytes. Raises
        `GpuMemoryError`."""
        ...

    def unmap(self, address: int) -> None:
        """Undo `map`."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy on the calling thread's current stream, which is not waited for. Raises `GpuMemoryError`."""
        ...

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """An allocation of our own as uint8 [nbytes]."""
        ...

    def flush(self) -> None:
        """Have what adapters have written be there for whatever the GPU is given from now on. Raises
        `GpuMemoryError`."""
        ...

    def exports_dma_buf(self) -> bool:
        """Whether this GPU, and every other that the process sees, lets adapters reach its memory as DMA-BUF."""
        ...


class CudaMemory:
    """That of a CUDA device. Raises `ConfigError` without the bindings."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        try:
            self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ConfigError(
                "handoffs between GPUs need the package cuda-bindings, which torch's CUDA builds bring since 2.11: "
                "install it, or leave disagg-transfer-gpu-pool-size at 0"
            ) from error
        runtime = self._runtime
        options = self._call(
            "cudaDeviceGetAttribute",
            runtime.cudaDeviceAttr.cudaDevAttrGPUDirectRDMAFlushWritesOptions,
            self.device.index,
        )
        by_host = runtime.cudaFlushGPUDirectRDMAWritesOptions.cudaFlushGPUDirectRDMAWritesOptionHost
        self._flushes = bool(int(options) & int(by_host))

    def _call(self, name: str, *arguments: object) -> Any:
        """The first thing that the call gives, made at our device."""
        with torch.cuda.device(self.device):
            return _result(name, getattr(self._runtime, name)(*arguments))

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, aligned for every dtype."""
        address = int(self._call("cudaMalloc", nbytes))
        assert address % _ALIGNED == 0, f"cudaMalloc gave {address:#x}"
        return address

    def free(self, address: int) -> None:
        """Give it back; waits for what the device is doing."""
        self._call("cudaFree", address)

    def export(self, address: int) -> bytes:
        """The handle, `HANDLE_BYTES` long."""
        return bytes(self._call("cudaIpcGetMemHandle", address).reserved)

    def map(self, handle: bytes) -> tuple[int, int]:
        """Address and bytes of the allocation of another process, also on another GPU whose memory ours reaches."""
        named = self._runtime.cudaIpcMemHandle_t()
        named.reserved = handle
        address = int(self._call("cudaIpcOpenMemHandle", named, self._runtime.cudaIpcMemLazyEnablePeerAccess))
        with torch.cuda.device(self.device):
            size = _result("cuMemGetAddressRange", self._driver.cuMemGetAddressRange(address), 1)
        return address, int(size)

    def unmap(self, address: int) -> None:
        """Undo `map`; waits for what the device is doing."""
        self._call("cudaIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the GPU, or from another one over the bus or NVLink."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault  # it finds out on which side each address is
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, stream)

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """The allocation as a tensor, which does not own it."""
        with torch.cuda.device(self.device):
            return torch.as_tensor(_Bytes(address, nbytes), device=self.device)

    def flush(self) -> None:
        """Nothing, where the GPU sees those writes in order by itself or has no such call."""
        if self._flushes:
            target = self._runtime.cudaFlushGPUDirectRDMAWritesTarget.cudaFlushGPUDirectRDMAWritesTargetCurrentDevice
            scope = self._runtime.cudaFlushGPUDirectRDMAWritesScope.cudaFlushGPUDirectRDMAWritesToOwner
            self._call("cudaDeviceFlushGPUDirectRDMAWrites", target, scope)

    def exports_dma_buf(self) -> bool:
        """As the driver says, which knows of the kernel too."""
        return all_export_dma_buf()


def all_export_dma_buf() -> bool:
    """Whether every GPU that the process sees lets adapters reach its memory as DMA-BUF; False where none can say."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        _result("cuInit", driver.cuInit(0))
        return all(
            int(_result("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, index)))
            for index in range(torch.cuda.device_count())
        )
    except (
        ImportError,
        RuntimeError,
    ):  # without a driver the bindings raise the latter, in a class of their own or not
        return False


def _result(name: str, given: tuple[Any, ...], which: int = 0) -> Any:
    """One of the values that a call of the bindings gave after its status; None when it gives none."""
    status, *values = given
    if int(status) != 0:
        raise GpuMemoryError(f"{name}: {getattr(status, 'name', status)}")
    return values[which] if values else None


class _Bytes:
    """Memory as the CUDA array interface describes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
