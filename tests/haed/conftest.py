"""The device on which tests of the engine compute, beside the CPU."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional, TypeVar

import pytest
import torch

if TYPE_CHECKING:
    from tests.haed.stand_in import StandInDevice

# A device has to be known to the process before its first backward pass. Once the stand-in is, no memory is pinned for a GPU.
if not torch.cuda.is_available():
    import tests.haed.stand_in  # noqa: F401


System = TypeVar("System", bound=torch.nn.Module)


@torch.no_grad()
def move_parameters(system: System) -> System:
    """Return the system in float64 and evaluation mode, with every parameter moved away from the symmetric start."""
    for parameter in system.double().parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return system.eval()


@dataclass
class ComputeDevice:
    """A device beside the CPU.

    Attributes:
        place: the device.
        stand_in: its implementation, unless it is a GPU.
    """

    place: torch.device
    stand_in: Optional["StandInDevice"] = None

    @contextmanager
    def refuse_waits(self, is_first: bool) -> Iterator[None]:
        """Refuse what waits for the device, but not the first time on a GPU, where libraries wait when they are set up."""
        if self.stand_in is not None:
            self.stand_in.waits.clear()
            yield
            assert not self.stand_in.waits
            return
        on_gpu = self.place.type == "cuda"
        if on_gpu and not is_first:
            with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def device() -> Iterator[ComputeDevice]:
    """The device of HAED_TEST_DEVICE, for example cuda; by default a stand-in for a GPU."""
    if chosen := os.environ.get("HAED_TEST_DEVICE"):
        yield ComputeDevice(torch.device(chosen))
        return
    from tests.haed.stand_in import DEVICE, StandInDevice  # after which no memory is pinned for a GPU

    with StandInDevice() as stand_in:
        yield ComputeDevice(DEVICE, stand_in)
