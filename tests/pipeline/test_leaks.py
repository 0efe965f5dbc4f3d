"""What cannot be predicted is not: who sees what it predicts, in whatever way, needs fewer than 8 bits for random bytes."""

import math

import pytest
import torch

from haed.base import ChunkingSpec, TokenBatch
from haed.options import SYSTEMS
from haed.registry import make_system
from haed.token.hourglass import Hourglass
from pipeline.config import OptimizerOptions, Options, load_options
from pipeline.training.optimizer import make_optimizer
from tests.conftest import ARCHITECTURES, TINY, TOKENS, of_kind

B, T, K = 8, 16, 4
NARROW = ["model.encoder.hidden=16", "model.encoder.width=16", "model.main.width=24", "model.decoder.width=32"]


def random_windows(generator: torch.Generator, fixed: bool) -> TokenBatch:
    """Random bytes; in chunks of random lengths where the ends of chunks cost nothing, with documents that begin inside."""
    lengths = torch.full((B, T), K) if fixed else torch.randint(1, K + 1, (B, T), generator=generator)
    tokens = torch.randint(256, (B, T, K), generator=generator) * (torch.arange(K) < lengths[..., None])
    return TokenBatch(tokens, lengths, torch.rand(B, T, generator=generator) < 0.05)


def bits_per_byte(options: Options) -> float:
    """Of fresh ones, after 40 steps."""
    torch.manual_seed(0)
    fixed = SYSTEMS[options.model.kind].chunks
    system = make_system(options.model, options.iem, ChunkingSpec(K, 256, fixed, T))
    optimizer = make_optimizer(system, OptimizerOptions(learning_rate=0.01))  # at one rate for all
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        windows = random_windows(generator, fixed)
        (-system.total_log_likelihood(system.prepare_inputs(windows)) / windows.lengths.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    system.eval()
    fresh = TokenBatch.concatenate_batches([random_windows(generator, fixed) for _ in range(8)])
    with torch.no_grad():
        nats = -system.log_likelihood(fresh).sum()
    return float(nats / fresh.lengths.sum() / math.log(2))


def test_a_tiny_system_sees_nothing_ahead() -> None:
    assert bits_per_byte(load_options("quickstart", of_kind("hourglass", TINY))) >= 7.98


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ARCHITECTURES)
def test_the_system_of_a_preset_sees_nothing_ahead(preset: str) -> None:
    """Narrower, but with all of its parts; presets are of every kind."""
    chunks = SYSTEMS[load_options(preset).model.kind].chunks
    assert bits_per_byte(load_options(preset, NARROW if chunks else TOKENS)) >= 7.98


def test_a_system_that_sees_ahead_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are given each token a place too early: the one that they predict."""
    body = Hourglass.forward_body
    monkeypatch.setattr(Hourglass, "forward_body", lambda self, x, *rest: body(self, x.roll(-1, 1), *rest))
    assert bits_per_byte(load_options("quickstart", of_kind("hourglass", TINY))) < 7.9
