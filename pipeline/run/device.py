"""Device, number of threads and precision of a run's computations, and the CPU's memory allocator."""

import ctypes
import gc
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from data.processes import available_threads
from pipeline.config import Options
from pipeline.console import warn_once

_CUBLAS, _CUBLAS_VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # with others PyTorch refuses to multiply
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@dataclass
class Compute:
    """Device, precision and determinism of a run's computations.

    Attributes:
        autocast: type of matrix products; None is float32.
        deterministic: use algorithms that give the same bits each time, also with several threads and on a GPU.
    """

    device: torch.device
    autocast: torch.dtype | None
    deterministic: bool = True

    def wait_for_device(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def precision_name(self) -> Literal["fp32", "bf16"]:
        """The precision of matrix products, as the options name it."""
        return "fp32" if self.autocast is None else "bf16"

    @property
    def processor_name(self) -> str:
        """The model of CPU or GPU, which affects the last digits of a result."""
        if self.device.type == "cuda":
            return str(torch.cuda.get_device_name(self.device))
        return f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"

    @contextmanager
    def use_precision(self) -> Iterator[None]:
        """Context in which models run: autocast, and deterministic algorithms if requested."""
        types = nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)
        with self.use_algorithms(), types:
            yield

    def use_algorithms(self) -> AbstractContextManager[None]:
        """Return the context in which gradients are computed: PyTorch uses deterministic algorithms if requested.

        The context itself raises ValueError if PyTorch has no deterministic algorithm for an operation on this device.
        """
        return _DETERMINISTIC if self.deterministic else nullcontext()


class _Deterministic:
    """Context in which PyTorch uses deterministic algorithms, while any thread is inside.

    PyTorch's settings are restored when the last thread leaves. Uninitialised memory is not filled: nothing reads it,
    and filling it takes time.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = _read_switches()
                _set_switches(2, True, False, False)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _set_switches(*self._before)
        name, is_unsupported, _ = str(error).partition(" does not have a deterministic implementation")
        if is_unsupported and isinstance(error, RuntimeError):
            raise ValueError(
                f"PyTorch {torch.__version__} has no deterministic algorithm for {name}. Use deterministic=false."
            ) from error


# What PyTorch has as a property of a module; mypy knows none.
_memory: Any = torch.utils.deterministic


def _read_switches() -> tuple[int, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    mode, fills = torch.get_deterministic_debug_mode(), _memory.fill_uninitialized_memory
    return mode, cudnn.deterministic, cudnn.benchmark, fills


def _set_switches(mode: int, deterministic: bool, benchmark: bool, fills: bool) -> None:
    # `use_deterministic_algorithms` would import Inductor, which takes seconds.
    torch.set_deterministic_debug_mode(mode)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    _memory.fill_uninitialized_memory = fills


_DETERMINISTIC = _Deterministic()


def setup_compute(options: Options, precision: str | None = None) -> Compute:
    """Choose device and precision, and set the number of threads; processes of torchrun share the machine.

    With `deterministic`, CUBLAS_WORKSPACE_CONFIG is set unless it is set already: cuBLAS reads it when it starts.
    PyTorch accepts only two values of it with deterministic algorithms. With another value on a GPU, deterministic
    algorithms are not used.

    Args:
        options: options of the run.
        precision: fp32, bf16 or auto; None is the precision of training.

    Raises:
        ValueError: the device does not exist.
    """
    if options.deterministic:
        os.environ.setdefault(_CUBLAS, _CUBLAS_VALUES[0])
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # torch.compile chooses no kernel by its time
    try:
        device = resolve_device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device={options.device} is not available ({reason}). Use device=auto or device=cpu"
        ) from error
    _use_threads(options.threads)
    deterministic = options.deterministic and is_cublas_deterministic(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_memory()
        # Probabilities near 1e-40 would take a hundred times as long as others. This holds for this thread, and for those
        # that it starts afterwards: whoever computed with several threads before keeps theirs.
        torch.set_flush_denormal(True)
    torch.backends.cudnn.allow_tf32 = False  # convolutions in float32; PyTorch's default for products is that already
    return Compute(device, _choose_autocast(device, precision or options.precision), deterministic)


def _choose_autocast(device: torch.device, precision: str) -> torch.dtype | None:
    """Return the type of matrix products for a precision, None for float32."""
    precise = precision == "fp32" or (precision == "auto" and not _has_fast_bfloat16(device))
    return None if precise else torch.bfloat16


def describe_compute(options: Options) -> tuple[str, dict[str, str]]:
    """Return the model of the processor, and the precision of weights, training and scoring."""
    device = resolve_device(options.device)
    chosen = {"training": options.precision, "scoring": options.evaluate.precision}
    machines = {name: Compute(device, _choose_autocast(device, precision)) for name, precision in chosen.items()}
    names = {name: machine.precision_name for name, machine in machines.items()}
    return machines["training"].processor_name, {"weights": "fp32", **names}


def is_cublas_deterministic(device: torch.device) -> bool:
    """Return whether cuBLAS can be deterministic on this device; warn once if it cannot."""
    value = os.environ.get(_CUBLAS)
    if device.type != "cuda" or value in _CUBLAS_VALUES:
        return True
    warn_once(f"{_CUBLAS}={value}: the last bits of results may differ between runs. Unset it for equal results.")
    return False


def _use_threads(wanted: int | None) -> None:
    """Set the number of threads; by default the cores this process may use, at most PyTorch's own number.

    PyTorch's own number is the one it started with, or the last one a caller set by `torch.set_num_threads`.
    """
    global _chosen, _own
    if torch.get_num_threads() != _chosen:
        _own = torch.get_num_threads()
    # Of processes that torchrun started without a number for each, this one's share.
    together = 1 if os.environ.get("OMP_NUM_THREADS") else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    _chosen = wanted or max(1, min(available_threads() // together, _own))
    torch.set_num_threads(_chosen)


_chosen = _own = torch.get_num_threads()


def check_device(name: str) -> None:
    """Raise ValueError if there is no device of that name. It is not touched: a GPU's context takes memory of it."""
    device = resolve_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name} is not available: this machine has {torch.cuda.device_count()} GPUs. Use device=auto or device=cpu"
        )


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; with several GPUs, `cuda` is the one of this process.

    Raises:
        RuntimeError: PyTorch knows no such device type.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device(name)


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether the processor multiplies bfloat16 faster than float32 (AVX512-BF16, AMX; Ampere and later)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def keep_memory() -> None:
    """Make glibc's allocator keep freed memory instead of returning it to the system after every tensor.

    By default each large tensor is mapped afresh and its pages are faulted in one by one. Multiplying two 8192×2048
    matrices element by element took 16 ms that way, and 3.7 ms with this setting. Other C libraries are left unchanged.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def release_memory() -> None:
    """Return the memory that `keep_memory` kept to the system, between two stages of a process."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
