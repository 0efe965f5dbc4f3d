"""Training and scoring of a public package (`pipeline.experiments.ours.packages`) for comparison with our systems.

    pip install --no-deps -r benchmarks/peers.txt
    python -m pipeline.experiments.ours.packaged NAME RUN key=value … --steps 1000 [--rates 1e-3 2e-3 4e-3 8e-3 1.6e-2]

All packages train on the original bytes of the train split, one document after the other, and are scored on valid.
The options choose the sharded text. They run in bfloat16 where that is fast, with AdamW, warm-up and a cosine
schedule. If several learning rates are given, each is tried first in a run of a fifth of the steps, and the best is
taken. The cosine and the warm-up (a tenth of the steps, at most 100) are those of that shorter run.

Windows have 256 bytes, or as many as the name says. When scoring, each window but the first adds half a window of new
bytes after half a window or more of context. Every byte is scored exactly once. The first byte of all, which cannot
be predicted, counts 8 bits. Before training a check makes sure that no prediction depends on later bytes. RUN gets
evaluation.json and package.json at the end, so an interrupted run starts over.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data.corpus import Corpus
from data.filesystem import write_json
from pipeline.config import Options, load_options
from pipeline.experiments.ours.packages import PACKAGES, Package
from pipeline.run.device import Compute, setup_compute
from pipeline.run.files import Evaluation
from pipeline.run.opened import count_characters
from pipeline.run.shards import open_shards

TOKENS, WARM_UP = 2048, 100  # bytes; steps, or a tenth of all if that is less
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def batch_of(context: int) -> int:
    """Return the windows per step, so that all packages see about as many bytes."""
    return round(TOKENS / context)


def check_causality(model: nn.Module, context: int) -> None:
    """Check that no prediction depends on later bytes; logits at i are those of byte i + 1.

    Raises:
        AssertionError: a prediction changes with a later byte.
    """
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (1, context), generator=generator)
    text[:, ::5] = 32
    text = text.to(next(model.parameters()).device)
    with torch.no_grad():
        before = model(text)
        assert before.shape == (1, context, 256)
        for place in (1, 2, 3, 64, 65, 129, context - 1):
            changed = text.clone()
            changed[0, place:] = (changed[0, place:] + 7) % 256
            after = model(changed)
            if not torch.allclose(before[0, :place], after[0, :place], atol=1e-4):
                raise AssertionError(f"{type(model).__name__} sees bytes from {place} on before it predicts them")


def training(
    model: nn.Module, context: int, rate: float, steps: int, text: Tensor, machine: Compute, seed: int
) -> Iterator[None]:
    """Train a package one step at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator, warm_up = torch.Generator().manual_seed(seed), max(1, min(WARM_UP, steps // 10))
    offsets = torch.arange(context + 1)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = rate * cosine * min(1.0, (step + 1) / warm_up)
        begin = torch.randint(len(text) - context, (batch_of(context), 1), generator=generator)
        batch = text[begin + offsets].long().to(machine.device)
        with machine.use_precision():
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        (loss + getattr(model, "auxiliary", 0.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def text_of(corpus: Corpus, split: str) -> Tensor:
    """Return the original bytes (n,) of a split."""
    return torch.frombuffer(bytearray().join(corpus.iterate_original_blocks(split)), dtype=torch.uint8)


def endless(name: str, corpus: Corpus, options: Options | None = None) -> Iterator[None]:
    """Train a package to be timed, on the device and with the threads of the options."""
    package, machine, text = PACKAGES[name], setup_compute(options or load_options(None, [])), text_of(corpus, "train")
    return training(package.build().to(machine.device), package.context, RATES[0], 1000, text, machine, 0)


def trained(package: Package, rate: float, steps: int, text: Tensor, machine: Compute, seed: int) -> nn.Module:
    """Return a model trained for `steps` steps."""
    torch.manual_seed(seed)
    model = package.build().to(machine.device)
    for _ in training(model, package.context, rate, steps, text, machine, seed):
        pass
    return model


@torch.no_grad()
def bits_per_byte(model: nn.Module, context: int, text: Tensor, machine: Compute) -> float:
    """Return the bits per byte of a text, scoring every byte once.

    Raises:
        ValueError: the text is shorter than a window.
    """
    if len(text) <= context:
        raise ValueError(f"the text to score has {len(text):,} bytes, and this package needs {context + 1:,}")
    model.eval()
    scored = torch.zeros(len(text), dtype=torch.long)
    scored[0] += 1
    total, known, batch = 8.0, 1, batch_of(context)
    windows = []
    while known < len(text):
        begin = min(max(0, known - context // 2 - 1), len(text) - context - 1)
        windows.append((begin, known))
        known = begin + context + 1
    for at in range(0, len(windows), batch):
        begins = torch.tensor([begin for begin, _ in windows[at : at + batch]])
        seen = text[begins[:, None] + torch.arange(context + 1)].long()
        logits = model(seen[:, :-1].to(machine.device)).cpu()  # in float32, as runs are evaluated
        nats = F.cross_entropy(logits.flatten(0, 1), seen[:, 1:].flatten(), reduction="none").unflatten(
            0, (-1, context)
        )
        for row, (begin, known) in zip(nats.double(), windows[at : at + batch], strict=True):
            total += float(row[known - begin - 1 :].sum()) / math.log(2)
            scored[known : begin + context + 1] += 1
    assert bool((scored == 1).all())
    return total / len(text)


def flops_per_byte(package: Package) -> float:
    """Return the FLOPs per byte of the matrix products of a step, forward and backward, including attention.

    They are counted by PyTorch's FlopCounterMode.
    """
    model, generator = package.build(), torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (batch_of(package.context), package.context), generator=generator)
    text[torch.rand(text.shape, generator=generator) < 0.17] = 32  # where some of them divide it
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(text).sum().backward()
    return float(counter.get_total_flops() / text.numel())


@torch.no_grad()
def bytes_per_second(name: str, count: int = 192) -> float:
    """Return the speed of a package writing a single text on one thread, with untrained weights.

    x-transformers uses its own generator with cached keys and values. The others have no suitable one:
    MEGABYTE-pytorch's also starts over for every byte. For them every byte takes a pass over the text so far, rounded
    up to 64 bytes, which all factors divide.
    """
    machine, package = setup_compute(load_options(None, ["threads=1"])), PACKAGES[name]
    torch.manual_seed(0)
    model = package.build().to(machine.device).eval()
    text = torch.full((1, package.context), 32, device=machine.device)
    for length in (8, count):  # the first text is warm-up
        began = time.perf_counter()
        with machine.use_precision():
            if name.startswith("x-transformers"):
                from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

                AutoregressiveWrapper(model).generate(text[:, :1], length, cache_kv=True)
            else:
                for at in range(length):
                    logits = model(text[:, : -(-(at + 1) // 64) * 64])[:, at]
                    text[0, at + 1] = torch.multinomial(logits.float().softmax(-1)[0], 1)
        seconds = time.perf_counter() - began
    return count / seconds


@dataclass
class Trained:
    """The contents of package.json: totals of a run, beside its evaluation.

    Attributes:
        rate: the best of the learning rates that were tried.
        tried: bits per byte by learning rate, after a fifth of the steps, on the first bytes of valid.
        parameters: of the model.
        steps: trained at that rate.
        seconds: of training at that rate.
        flops: of these steps.
    """

    rate: float
    tried: dict[str, float]
    parameters: int
    steps: int
    seconds: float
    flops: float


def train(
    corpus: Corpus, name: str, steps: int, seed: int, rates: list[float], threads: str
) -> tuple[Trained, Evaluation]:
    """Train and score a package."""
    package, machine = PACKAGES[name], setup_compute(load_options(None, [f"threads={threads}"]))
    text, valid = (text_of(corpus, split) for split in ("train", "valid"))
    check_causality(package.build().to(machine.device), package.context)
    tried = {}
    for rate in rates if len(rates) > 1 else ():
        model = trained(package, rate, max(1, steps // 5), text, machine, seed)
        tried[rate] = bits_per_byte(model, package.context, valid[:100_000], machine)
    rate = min(tried, key=tried.__getitem__) if tried else rates[0]
    began = time.perf_counter()
    model = trained(package, rate, steps, text, machine, seed)
    ended = time.perf_counter()
    found, size, letters = (
        bits_per_byte(model, package.context, valid, machine),
        len(valid),
        count_characters(valid.numpy().tobytes()),
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    of_tried = {f"{rate:g}": each for rate, each in tried.items()}
    flops = flops_per_byte(package) * batch_of(package.context) * package.context * steps
    return Trained(rate, of_tried, parameters, steps, ended - began, flops), Evaluation(
        split="valid",
        stage="train",
        step=steps,
        checkpoint="",
        text=None,
        stride=0,
        bits=found * size,
        tokens=size,
        characters=letters,
        bytes=size,
        bits_per_token=found,
        bits_per_char=found * size / letters,
        bits_per_byte=found,
        bits_per_dim=None,
        context=package.context,
        seconds=time.perf_counter() - ended,
        precision="fp32",
        processor=machine.processor_name,
        yardsticks=[],
        not_beaten=[],
    )


def main() -> None:
    """Run the command described above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PACKAGES)
    parser.add_argument("run", type=Path)
    parser.add_argument("words", nargs="+", metavar="key=value", help="source and place of the shards")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--threads", default="null", help="CPU threads (default: all cores)")
    asked = parser.parse_intermixed_args()
    found, evaluation = train(
        open_shards(load_options(None, asked.words)), asked.name, asked.steps, asked.seed, asked.rates, asked.threads
    )
    asked.run.mkdir(parents=True, exist_ok=True)
    files = {"package": asdict(found), "evaluation": asdict(evaluation)}  # the second says that all is there
    for file, value in files.items():
        write_json(asked.run / f"{file}.json", value)


if __name__ == "__main__":
    main()
