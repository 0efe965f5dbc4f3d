"""Public packages at two to three million parameters, trained and scored for comparison with our systems.

    pip install --no-deps -r benchmarks/peers.txt
    python -m experiments.external_models NAME RUN key=value … --steps 1000 [--rates 1e-3 2e-3 4e-3 8e-3 1.6e-2] [--memory]

Their models map tokens (B, L) to the logits (B, L, V) of the next tokens. Tokens are bytes, or byte pairs that are learned
from the train split before the training. All train on the original bytes of the train split, one document after the
other, and are scored on valid. The options choose the sharded text. They run in bfloat16 where that is fast, with AdamW,
warm-up and a cosine schedule. If several learning rates are given, each is tried first in a run of a fifth of the steps,
and the best is taken. The cosine and the warm-up (a tenth of the steps, at most 100) are those of that shorter run.

Windows have 256 bytes, or as many as the name says, or 128 byte pairs. When scoring, each window but the first adds half
a window of new tokens after half a window or more of context. Every token is scored exactly once. The first of all, which
cannot be predicted, counts log2 V bits. A text has other pairs than those that are scored, whose probability would count
too: models of byte pairs are a little better than their figures. Before training a check makes sure that no prediction
depends on later tokens. RUN gets evaluation.json, package.json and environment.json at the end, so an interrupted run
starts over.
"""

import argparse
import math
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.corpus import Corpus
from data.filesystem import write_json
from experiments.measures import Measurement, measurement_path
from experiments.memory_for_tokens import (
    HELD_OUT,
    ReadTokens,
    fit_memory,
    recall_tokens,
    record_inputs,
    remembered_metrics,
    score_tokens,
)
from haed.base import count_flops
from pipeline.config import Options, load_options
from pipeline.run.device import Compute, setup_compute
from pipeline.run.files import Evaluation
from pipeline.run.opened import compute_word_perplexity, count_characters, count_words
from pipeline.run.run_directory import describe_environment
from pipeline.run.sharding import open_shards

CONTEXT, TOKENS = 256, 2048  # bytes of a window, bytes of a step
BYTES, BYTE_PAIRS = 256, 16384  # tokens of a vocabulary
WARM_UP = 100  # steps, or a tenth of all if that is less
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def build_x_transformers(context: int = CONTEXT) -> nn.Module:
    """Return a flat transformer."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=192, depth=5, heads=4, attn_dim_head=48, rotary_pos_emb=True, rotary_emb_dim=32)
    return TransformerWrapper(num_tokens=256, max_seq_len=context, attn_layers=layers, use_abs_pos_emb=False)


def build_megabyte() -> nn.Module:
    """Return a model with patches of four bytes."""
    from MEGABYTE_pytorch import MEGABYTE

    return MEGABYTE(num_tokens=256, dim=(256, 128), depth=(2, 2), max_seq_len=(CONTEXT // 4, 4), heads=4, dim_head=48)


def build_hourglass() -> nn.Module:
    """Return the package's simple variant, shortened by 2."""
    from hourglass_transformer_pytorch import HourglassTransformerLM

    return HourglassTransformerLM(
        num_tokens=256, dim=192, max_seq_len=CONTEXT, depth=(1, 2, 1), shorten_factor=2, heads=4, dim_head=48
    )


class Annotated(nn.Module):
    """labml-nn's Hourglass in the model of its experiment, without dropout."""

    def __init__(self) -> None:
        from labml_nn.transformers.hour_glass import HourGlass
        from labml_nn.transformers.positional_encoding import get_positional_encoding

        super().__init__()
        self.embedding, self.norm, self.output = nn.Embedding(256, 256), nn.LayerNorm(256), nn.Linear(256, 256)
        self.hourglass = HourGlass(4, 256, 0.0, 512, [4, 2])
        self.register_buffer("positions", get_positional_encoding(256, CONTEXT), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).transpose(0, 1) * 256**0.5 + self.get_buffer("positions")[: x.shape[1]]
        return self.output(self.norm(self.hourglass(x))).transpose(0, 1)


class DynamicChunking(nn.Module):
    """H-Net (Hwang et al. 2025) of h-net-dynamic-chunking, with one level.

    `auxiliary` is its ratio loss in the last pass.
    """

    def __init__(self) -> None:
        from h_net_dynamic_chunking.h_net import HNet
        from x_transformers import Decoder

        super().__init__()
        layers = partial(Decoder, heads=4, attn_dim_head=48, rotary_pos_emb=True, rotary_emb_dim=32)
        self.embedding, self.norm, self.output = nn.Embedding(256, 192), nn.LayerNorm(192), nn.Linear(192, 256)
        inner = layers(dim=256, depth=2)
        self.net = HNet(layers(dim=192, depth=1), inner, layers(dim=192, depth=1), dim=192, dim_inner=256)
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(self.embedding(x))
        self.auxiliary = output.loss
        return self.output(self.norm(output.output))


class ByteLatent(nn.Module):
    """Byte Latent Transformer (Pagnoni et al. 2024) of transformers, with hashed n-grams.

    Patches by entropy need a byte model trained beforehand. Patches by spaces are the paper's own alternative (section
    2.2): a patch ends with a character that is neither letter nor digit.
    """

    def __init__(self) -> None:
        from transformers.models.blt.configuration_blt import BltConfig
        from transformers.models.blt.modeling_blt import BltForCausalLM

        super().__init__()
        local = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384, "hidden_size_global": 256}
        main = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 704}
        parts: dict[str, Any] = {
            "encoder_config": local | {"num_hidden_layers": 1},
            "decoder_config": local | {"num_hidden_layers": 2},
        }
        config = BltConfig(encoder_hash_byte_group_vocab=500, patch_in_forward=False, global_config=main, **parts)
        self.model = BltForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        letters = [range(48, 58), range(65, 91), range(97, 123), range(128, 256)]
        ends = torch.ones(256, dtype=torch.bool, device=x.device)
        ends[[byte for each in letters for byte in each]] = False
        begins = torch.ones(len(x), x.shape[1] + 1, dtype=torch.long, device=x.device)  # the first patch is one byte
        begins[:, 2:] = ends[x[:, 1:]]
        patches = begins.cumsum(1) - 1
        lengths = patches.new_zeros(len(x), int(patches.max()) + 1).scatter_add_(1, patches, torch.ones_like(patches))
        return self.model(input_ids=x + 4, patch_lengths=lengths, use_cache=False).logits[..., 4:]  # four special ones


class SubwordLlama(nn.Module):
    """Llama (Touvron et al. 2023) of transformers, with byte pairs as tokens."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        layers: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=BYTE_PAIRS, num_attention_heads=4, tie_word_embeddings=True, **layers)
        self.model = LlamaForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x, use_cache=False).logits


@dataclass(frozen=True)
class Package:
    """A public package.

    Attributes:
        build: makes its model.
        module: that it needs.
        context: tokens of a window.
        output: name of the model's output layer, if its inputs can be remembered: (B, L, W), one for each token.
        vocabulary: bytes, or the number of byte pairs.
        step_tokens: tokens of a step.
    """

    build: Callable[[], nn.Module]
    module: str
    context: int = CONTEXT
    output: str = ""
    vocabulary: int = BYTES
    step_tokens: int = TOKENS

    @property
    def windows(self) -> int:
        """Return the windows of a step. All packages see about as many bytes."""
        return round(self.step_tokens / self.context)

    @property
    def is_installed(self) -> bool:
        """Return whether it is installed."""
        return find_spec(self.module) is not None


PACKAGES = {
    "x-transformers": Package(build_x_transformers, "x_transformers", output="to_logits"),
    "x-transformers, 768": Package(partial(build_x_transformers, 768), "x_transformers", 768, "to_logits"),
    "MEGABYTE-pytorch": Package(build_megabyte, "MEGABYTE_pytorch"),
    "hourglass-transformer-pytorch": Package(build_hourglass, "hourglass_transformer_pytorch"),
    "labml-nn": Package(Annotated, "labml_nn"),
    "h-net-dynamic-chunking": Package(DynamicChunking, "h_net_dynamic_chunking"),
    "transformers, BLT": Package(ByteLatent, "transformers"),
    "transformers, Llama of byte pairs": Package(
        SubwordLlama, "transformers", 128, vocabulary=BYTE_PAIRS, step_tokens=512
    ),
}


def check_causality(model: nn.Module, package: Package) -> None:
    """Check that no prediction depends on later tokens; logits at i are those of token i + 1.

    Raises:
        AssertionError: a prediction changes with a later token.
    """
    model.eval()
    generator, context = torch.Generator().manual_seed(0), package.context
    text = torch.randint(package.vocabulary, (1, context), generator=generator)
    text[:, ::5] = 32
    text = text.to(next(model.parameters()).device)
    with torch.no_grad():
        before = model(text)
        assert before.shape == (1, context, package.vocabulary)
        for place in (1, 2, 3, 64, 65, context // 2 + 1, context - 1):
            changed = text.clone()
            changed[0, place:] = (changed[0, place:] + 7) % package.vocabulary
            after = model(changed)
            if not torch.allclose(before[0, :place], after[0, :place], atol=1e-4):
                raise AssertionError(f"{type(model).__name__} sees tokens from {place} on before it predicts them")


def train_steps(
    model: nn.Module, package: Package, rate: float, steps: int, tokens: Tensor, machine: Compute, seed: int
) -> Iterator[None]:
    """Train a package one step at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator, warm_up = torch.Generator().manual_seed(seed), max(1, min(WARM_UP, steps // 10))
    offsets = torch.arange(package.context + 1)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = rate * cosine * min(1.0, (step + 1) / warm_up)
        begin = torch.randint(len(tokens) - package.context, (package.windows, 1), generator=generator)
        batch = tokens[begin + offsets].long().to(machine.device)
        with machine.use_precision():
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        (loss + getattr(model, "auxiliary", 0.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def read_split(corpus: Corpus, split: str) -> Tensor:
    """Return the original bytes (n,) of a split."""
    return torch.frombuffer(bytearray().join(corpus.iterate_original_blocks(split)), dtype=torch.uint8)


def learn_tokens(text: Tensor, vocabulary: int) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts bytes (n,) into tokens: bytes, or byte pairs that are learned from `text`.

    Byte pairs are those of GPT-2: of UTF-8, within words. Lines are cut one by one. A last character of which bytes are
    missing is left out.

    Raises:
        UnicodeDecodeError: a text to be cut into byte pairs is not UTF-8.
    """
    if vocabulary == BYTES:
        return lambda text: text
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def split_lines(text: Tensor) -> list[str]:
        return getincrementaldecoder("utf-8")().decode(text.numpy().tobytes()).splitlines(keepends=True)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(split_lines(text), trainer)

    def cut(text: Tensor) -> Tensor:
        lines = tokenizer.encode_batch_fast(split_lines(text))
        return torch.tensor([token for line in lines for token in line.ids])

    return cut


def train_endlessly(name: str, corpus: Corpus, options: Options) -> Iterator[None]:
    """Train a package to be timed, on the device and with the threads of the options."""
    package, machine, text = PACKAGES[name], setup_compute(options), read_split(corpus, "train")
    tokens = learn_tokens(text, package.vocabulary)(text)
    return train_steps(package.build().to(machine.device), package, RATES[0], 1000, tokens, machine, 0)


def train_model(package: Package, rate: float, steps: int, tokens: Tensor, machine: Compute, seed: int) -> nn.Module:
    """Return a model trained for `steps` steps."""
    torch.manual_seed(seed)
    model = package.build().to(machine.device)
    for _ in train_steps(model, package, rate, steps, tokens, machine, seed):
        pass
    return model


def score_bits(model: nn.Module, package: Package, tokens: Tensor, machine: Compute) -> float:
    """Return the bits of a text, scoring every token once; see `read_tokens`."""
    read = (float(piece.log_prob.sum()) for piece in read_tokens(model, package, tokens, machine))
    return math.log2(package.vocabulary) - sum(read) / math.log(2)


@torch.no_grad()
def read_tokens(
    model: nn.Module, package: Package, tokens: Tensor, machine: Compute, output: nn.Module | None = None
) -> Iterator[ReadTokens]:
    """Read every token of a text but the first once, as one document.

    If the output layer is given, its inputs are the states.

    Raises:
        ValueError: the text is shorter than a window.
    """
    context = package.context
    if len(tokens) <= context:
        raise ValueError(f"the text to score has {len(tokens):,} tokens, but this package needs {context + 1:,}")
    model.eval()
    scored = torch.zeros(len(tokens), dtype=torch.long)
    scored[0] += 1
    known, batch = 1, package.windows
    windows = []
    while known < len(tokens):
        begin = min(max(0, known - context // 2 - 1), len(tokens) - context - 1)
        windows.append((begin, known))
        known = begin + context + 1
    for at in range(0, len(windows), batch):
        begins = torch.tensor([begin for begin, _ in windows[at : at + batch]])
        seen = tokens[begins[:, None] + torch.arange(context + 1)].long()
        with record_inputs(output) if output is not None else nullcontext([seen.new_zeros(*seen.shape, 0)]) as inputs:
            logits = model(seen[:, :-1].to(machine.device)).cpu()  # in float32, as runs are evaluated
        log_prob = -F.cross_entropy(logits.mT, seen[:, 1:], reduction="none").double()
        for row, (begin, known) in enumerate(windows[at : at + batch]):
            new = slice(known - begin - 1, context)
            yield ReadTokens(0, seen[row, 1:][new], inputs[0][row, new].float().cpu(), log_prob[row, new])
            scored[known : begin + context + 1] += 1
    assert bool((scored == 1).all())


def count_step_flops(package: Package) -> float:
    """Return the FLOPs of the matrix products of a step, forward and backward, including attention."""
    model, generator = package.build(), torch.Generator().manual_seed(0)
    tokens = torch.randint(97, 123, (package.windows, package.context), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.17] = 32  # where some of them divide bytes
    return count_flops(lambda: model(tokens).sum().backward())


def measure_remembered(package: Package, model: nn.Module, corpus: Corpus, machine: Compute) -> Measurement:
    """Measure a package on the test split as `experiments.measures.measure_remembered` does our models.

    Raises:
        ValueError: its states cannot be remembered, or a split is too short.
    """
    if not package.output:
        raise ValueError(f"{package.module} has no state for each token before its output layer, so it has no memory")
    train, valid, test = (read_split(corpus, split) for split in ("train", "valid", "test"))
    cut, output = learn_tokens(train, package.vocabulary), model.get_submodule(package.output)

    def read(tokens: Tensor) -> Iterator[ReadTokens]:
        return read_tokens(model, package, tokens, machine, output)

    memory, sharpness = fit_memory(recall_tokens([cut(train).numpy()]), list(read(cut(valid)[:HELD_OUT])))
    characters = count_characters(test.numpy().tobytes())
    alone, remembering = (math.log2(package.vocabulary) + bits for bits in score_tokens(memory, read(cut(test))))
    notes = [f"{package.module}: sharpness of the cache {sharpness:g}"]
    return Measurement(remembered_metrics(alone, remembering, characters), notes=notes)


def train_and_score(
    corpus: Corpus, name: str, steps: int, seed: int, rates: list[float], machine: Compute
) -> tuple[nn.Module, dict[str, Any], Evaluation]:
    """Train and score a package; return its model, the contents of package.json, and the evaluation.

    package.json has the best of the learning rates that were tried, and the bits per byte of each after a fifth of the
    steps. It also has parameters, steps, seconds and FLOPs of the training at that rate.
    """
    package = PACKAGES[name]
    train, valid = (read_split(corpus, split) for split in ("train", "valid"))
    check_causality(package.build().to(machine.device), package)
    cut = learn_tokens(train, package.vocabulary)
    text, scored = cut(train), cut(valid)
    tried, part = {}, scored[:HELD_OUT]
    for rate in rates if len(rates) > 1 else ():
        model = train_model(package, rate, max(1, steps // 5), text, machine, seed)
        tried[rate] = score_bits(model, package, part, machine) / len(part) * len(scored) / len(valid)
    rate = min(tried, key=tried.__getitem__) if tried else rates[0]
    began = time.perf_counter()
    model = train_model(package, rate, steps, text, machine, seed)
    ended = time.perf_counter()
    bits, size = score_bits(model, package, scored, machine), len(valid)
    characters = count_characters(valid.numpy().tobytes())
    totals = {
        "rate": rate,
        "tried": {f"{each:g}": bits_of_rate for each, bits_of_rate in tried.items()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "seconds": ended - began,
        "flops": count_step_flops(package) * steps,
    }
    evaluation = Evaluation(
        split="valid",
        stage="train",
        step=steps,
        checkpoint="",
        text=None,
        stride=0,
        bits=bits,
        tokens=len(scored),
        characters=characters,
        bytes=size,
        bits_per_token=bits / len(scored),
        bits_per_char=bits / characters,
        bits_per_byte=bits / size,
        word_perplexity=compute_word_perplexity(bits, count_words(valid.numpy().tobytes())),
        bits_per_dim=None,
        context=package.context,
        seconds=time.perf_counter() - ended,
        precision="fp32",
        processor=machine.processor_name,
        baselines=[],
        not_beaten=[],
    )
    return model, totals, evaluation


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
    parser.add_argument("--memory", action="store_true", help="also score the test split with memory")
    arguments = parser.parse_intermixed_args()
    options = load_options(None, [*arguments.words, f"threads={arguments.threads}", f"seed={arguments.seed}"])
    corpus, machine, rates = open_shards(options), setup_compute(options), list(arguments.rates)
    model, totals, evaluation = train_and_score(corpus, arguments.name, arguments.steps, arguments.seed, rates, machine)
    path = measurement_path(arguments.run, "remembered")
    path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.memory:
        write_json(path, asdict(measure_remembered(PACKAGES[arguments.name], model, corpus, machine)))
    environment, distribution = describe_environment(options), arguments.name.partition(",")[0]
    versions = environment.versions | {distribution: version(distribution)}
    write_json(arguments.run / "environment.json", asdict(replace(environment, versions=versions)))
    write_json(arguments.run / "package.json", totals)
    write_json(arguments.run / "evaluation.json", asdict(evaluation))  # says that all is there


if __name__ == "__main__":
    main()
