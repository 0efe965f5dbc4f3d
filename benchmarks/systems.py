r"""Every system at equal parameters, equal data and equal seconds of training, beside the public packages of the same models.

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/systems.py results.jsonl ../shared/data/wikitext-2 ../shared/data/wikipedia-en-2015:10 \
        [--seconds 200] [--seeds 0 1 2] [--only flat hourglass] [--write docs/systems.md]

FOLDER:10 takes the first ten million bytes of the folder's train*.txt[.xz], to the end of a line; valid.txt[.xz] is scored.
Ours are trained by the ordinary commands, each in processes of its own: `haed` in its two phases, all others end to end. Packages
are trained and scored as benchmarks/peers.py does it; the learning rate of the first seed is tuned, the others take it over.

A run that is finished is a line of results.jsonl and is not done again; the same command goes on after it was stopped. Then the
lines are drawn and written, with --write between the marks of a document and beside it as a picture.

| figure | what it is |
|---|---|
| bits/char | of the whole valid split, exactly; over seeds the mean, and half of the distance of the extremes |
| FLOPs/char | of training, forward and backward, for each character of the windows that were read |
| memory | the most that the training process had in memory, PyTorch included |
| chars/s | sampled one after the other, a single text, with cached state |
"""

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # else `data` would be the script beside this one

from benchmarks.peers import OURS, PEERS
from pipeline import open_run
from pipeline.config import load
from pipeline.options import SampleOptions
from pipeline.run.metrics import read
from pipeline.run.opened import characters

# Preset, phases, and what makes it as large as the others, two to three million parameters.
SYSTEMS: dict[str, tuple[str, tuple[str, ...], list[str]]] = {
    "haed": ("wikitext2", ("pretrain", "finetune"), OURS),
    "haed, decoder alone": (
        "wikitext2",
        ("pretrain", "finetune"),
        [*OURS, "model.mixture.known=0", "iem.correction=none", "finetune.iem_weight=0"],
    ),
    "haed, end to end": ("wikitext2", ("train",), OURS),
    "hred": ("hred", ("train",), []),
    "hred-transformer": ("hred-transformer", ("train",), []),
    "megabyte": ("megabyte", ("train",), []),
    "flat": ("flat", ("train",), []),
    "hourglass": ("hourglass", ("train",), []),
    "hourglass-annotated": ("hourglass-annotated", ("train",), []),
    "top-down": ("top-down", ("train",), []),
    "bottom-up": ("bottom-up", ("train",), []),
    "retina": ("retina", ("train",), []),
    "spacebyte": ("spacebyte", ("train",), []),
}
SMALLEST, LARGEST = 2e6, 3e6  # parameters
BEGIN, END = "<!-- benchmarks/systems.py: begin -->", "<!-- benchmarks/systems.py: end -->"
Result = dict[str, Any]


def prepared(corpus: str, place: Path) -> Path:
    """A folder with train.txt, valid.txt and test.txt of a corpus, which may be given with a number of millions of bytes."""
    source, _, megabytes = corpus.partition(":")
    folder = place / (Path(source).resolve().name + (f"-{megabytes}" if megabytes else ""))
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        paths = sorted(path for path in Path(source).glob(f"{split}*.txt*") if path.suffix in (".txt", ".xz"))
        text, most = b"", int(float(megabytes) * 1e6) if megabytes and split == "train" else None
        for path in paths:
            with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
                text += file.read(-1 if most is None else most - len(text))
        assert text, f"{source} has no {split}*.txt"
        cut = text.rindex(b"\n") + 1 if most is not None and len(text) == most else len(text)
        (folder / f"{split}.txt").write_bytes(text[:cut])
    return folder


def command(*words: str) -> tuple[Result, int]:
    """Runs a Python command that ends with a line of JSON; returns that, and the most bytes the process had in memory."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(words)}: {said.read()[-1000:]}")
    return json.loads(printed.splitlines()[-1]), usage.ru_maxrss * 1024


def ours(name: str, folder: Path, seconds: float, seed: int, threads: str, place: Path) -> Result:
    """Trains and scores one of our systems."""
    preset, phases, sizes = SYSTEMS[name]
    own = load(preset)
    total = sum(getattr(own, phase).seconds for phase in phases)
    limits = [f"{phase}.seconds={getattr(own, phase).seconds / total * seconds}" for phase in phases]
    where = [f"runs_dir={place}/runs", f"shards_dir={place.parent}/shards", "name=run", f"threads={threads}"]
    source = ["source.kind=wikitext", f"source.path={folder}", "source.pattern=*.txt"]
    asked = ["--config", preset, *source, *where, *sizes, *limits, f"seed={seed}", "validation.times=8", "--json"]
    command("-m", "pipeline", "shard", *asked)
    train, valid = ((folder / f"{split}.txt").read_bytes() for split in ("train", "valid"))
    per_token = len(valid) / characters(valid)
    totals, curve, memory, read_in = {"step": 0.0, "seconds": 0.0, "flops": 0.0}, [], 0, 0.0
    for phase in phases:
        trained, most = command("-m", "pipeline", phase, *asked)
        memory, read_in = max(memory, most), read_in + trained["epochs"] * characters(train)
        records = read(place / "runs" / "run" / phase / "metrics.jsonl")
        for record in records:
            if (bits := record.get("validation/bits_per_token")) is not None:
                curve.append([*(totals[key] + record[key] for key in ("seconds", "flops")), bits * per_token])
        for key in totals:
            totals[key] += max(record.get(key, 0.0) for record in records)
    run = str(place / "runs" / "run")
    found, _ = command("-m", "pipeline", "evaluate", run, "evaluate.split=valid", "evaluate.yardsticks=false", "--json")
    assert found["bytes"] == len(valid), (found["bytes"], len(valid))
    sampled, _ = command("-c", f"from benchmarks.systems import sample; sample({run!r})")
    steps, flops = int(totals["step"]), totals["flops"] / read_in
    return {"bits": found["bits_per_char"], "steps": steps, "flops": flops, "memory": memory, "curve": curve, **sampled}


def sample(run: str, chunks: int = 60) -> None:
    """Prints the characters per second of one text, after a first short one, and the number of parameters."""
    opened = open_run(run)
    for length in (2, chunks):
        began = time.perf_counter()
        (text,) = opened.sample(" ", 1, SampleOptions(chunks=length))
    rate = characters(text) / (time.perf_counter() - began)
    print(json.dumps({"parameters": sum(x.numel() for x in opened.system.parameters()), "sampled": rate}))


def package(name: str, folder: Path, seconds: float, seed: int, threads: str, rates: list[float]) -> Result:
    """Trains and scores a public package."""
    asked = ["--only", name, "--seconds", str(seconds), "--seed", str(seed), "--rates", *map(str, rates), "--json"]
    if threads != "null":
        asked += ["--threads", threads]
    found, memory = command("benchmarks/peers.py", str(folder), *asked)
    valid = (folder / "valid.txt").read_bytes()
    per_char = len(valid) / characters(valid)
    kept = {key: found[key] for key in ("parameters", "steps", "rate")}
    bits, flops = found["bits_per_byte"] * per_char, found["flops_per_byte"] * per_char
    return {"bits": bits, "flops": flops, "memory": memory, "sampled": None, "curve": [], **kept}


def key(result: Result) -> tuple[str, float, int, str]:
    return result["corpus"], result["seconds"], result["seed"], result["name"]


def markdown(results: list[Result]) -> str:
    """A table for each corpus and number of seconds, from fewest bits to most."""
    lines = []
    groups = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["corpus"], result["seconds"]][result["name"]].append(result)
    for (corpus, seconds), systems in sorted(groups.items()):
        lines += [f"**{corpus}, {seconds:g} s**", ""]
        lines.append("| system | bits/char | seeds | steps | MFLOPs/char | parameters | memory, GB | chars/s |")
        lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
        rows = []
        for name, found in systems.items():
            bits = [each["bits"] for each in found]
            mean = {
                what: statistics.mean(each[what] for each in found)
                for what in ("steps", "flops", "parameters", "memory")
            }
            spread = f" ± {(max(bits) - min(bits)) / 2:.3f}" if len(bits) > 1 else ""
            written = [each["sampled"] for each in found if each["sampled"] is not None]
            shown = f"*{name}*" if name in PEERS else name
            rows.append(
                (
                    statistics.mean(bits),
                    f"| {shown} | {statistics.mean(bits):.3f}{spread} | {len(bits)} | {mean['steps']:,.0f} | "
                    f"{mean['flops'] / 1e6:.1f} | {mean['parameters'] / 1e6:.2f} M | {mean['memory'] / 1e9:.2f} | "
                    f"{f'{statistics.mean(written):,.0f}' if written else ''} |",
                )
            )
        lines += [row for _, row in sorted(rows)] + [""]
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Bits on the validation windows against seconds and against FLOPs, of the longest runs of the first seed there is."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    corpora = sorted({result["corpus"] for result in results})
    colours = dict(zip(SYSTEMS, colormaps["tab20"].colors, strict=False))
    figure = Figure((11, 4.2 * len(corpora)), layout="constrained")
    grid = figure.subplots(len(corpora), 2, squeeze=False, sharey="row")
    for row, corpus in zip(grid, corpora, strict=True):
        longest = max(result["seconds"] for result in results if result["corpus"] == corpus)
        shown = [r for r in results if (r["corpus"], r["seconds"]) == (corpus, longest) and r["curve"]]
        for place, (axes, label) in enumerate(zip(row, ("seconds of training", "model FLOPs"), strict=True)):
            for name in SYSTEMS:
                if of := [result for result in shown if result["name"] == name]:
                    curve = min(of, key=lambda result: result["seed"])["curve"]
                    x, bits = ([point[at] for point in curve] for at in (place, 2))
                    axes.plot(x, bits, ".-", color=colours[name], label=name)
            axes.set_xlabel(label)
            axes.set_xscale("log" if place else "linear")
            axes.set_title(corpus)
        row[0].set_ylabel("validation, bits/char")
        if shown:
            ends = [result["curve"][-1][2] for result in shown]
            row[0].set_ylim(min(ends) - 0.05, max(ends) + max(0.3, max(ends) - min(ends)))  # not how curves begin
            row[1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def write(document: Path, results: list[Result]) -> None:
    """Puts the tables between the marks of a document, and the picture beside it."""
    text = document.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    draw(results, document.with_suffix(".png"))
    picture = f"![Bits against seconds and FLOPs]({document.with_suffix('.png').name})"
    document.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n{picture}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a line of JSON for each finished run")
    parser.add_argument("corpora", nargs="*", metavar="FOLDER[:MEGABYTES]")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="tried for the packages")
    parser.add_argument("--only", nargs="+", choices=[*SYSTEMS, *PEERS], default=[*SYSTEMS, *PEERS])
    parser.add_argument("--threads", default="null", help="CPU threads of each run (default: all cores)")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="whose table is to be replaced")
    arguments = parser.parse_args()
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    results: list[Result] = [json.loads(line) for line in lines]
    place = arguments.results.resolve().with_suffix("")
    for corpus in arguments.corpora:
        folder = prepared(corpus, place)
        for seed in arguments.seeds:
            for name in arguments.only:
                asked: Result = {"corpus": folder.name, "seconds": arguments.seconds, "seed": seed, "name": name}
                if key(asked) in map(key, results):
                    continue
                if name in PEERS:
                    tuned = [r["rate"] for r in results if key(r | {"seed": 0}) == key(asked | {"seed": 0})]
                    rates = tuned[:1] or arguments.rates
                    found = package(name, folder, arguments.seconds, seed, arguments.threads, rates)
                else:
                    with tempfile.TemporaryDirectory(dir=place) as runs:
                        found = ours(name, folder, arguments.seconds, seed, arguments.threads, Path(runs))
                found = asked | found
                results.append(found)
                with arguments.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                wrong = "" if SMALLEST <= found["parameters"] <= LARGEST else ", NOT OF EQUAL SIZE"
                said = f"{found['bits']:.4f} bits/char, {found['parameters']:,} parameters{wrong}"
                print(f"{folder.name} {arguments.seconds:g} s seed {seed} {name}: {said}", flush=True)
    if arguments.write:
        write(arguments.write, results)
    print(markdown(results))


if __name__ == "__main__":
    main()
