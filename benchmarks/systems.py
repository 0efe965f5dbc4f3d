r"""Every system at equal parameters, equal data and equal seconds of training, beside the public packages of the same models.

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/systems.py benchmarks/systems.jsonl ../shared/data/wikitext-2 ../shared/data/wikipedia-en-2015:10 \
        [--seconds 200] [--seeds 0 1 2] [--only flat hourglass] [--write docs/systems.md]

FOLDER:10 takes the first ten million bytes of the folder's train*.txt[.xz], to the end of a line, and half a million of valid*;
without a number valid is scored whole. Ours are trained by the ordinary commands, each in processes of its own: `haed` in its
two phases, all others end to end. Packages are trained and scored by
`pipeline.experiments.ours.packaged`; the learning rate of the first seed is tuned, the others take it over.

Seconds are those of a clock (pipeline/train/timing.py) that is measured first, for each corpus, with all cores of a machine that
should do nothing else; runs are limited in steps. One line of the results is the clock, any other a run that is finished and
is not done again: the same command goes on after it was stopped, also elsewhere. A system that the clock does not know yet is
measured beside x-transformers, its seconds scaled by what that took. Texts are sampled at the end of all, again on a quiet
machine, from the runs of seed 0. Then the lines are drawn and written, with --write between the marks of a document and beside
it as a picture.

| figure | what it is |
|---|---|
| bits/char | exactly, of the valid split as above; over seeds the mean, and half of the distance of the extremes |
| FLOPs/char | of training, forward and backward, for each character of the windows that were read |
| memory | the most that the training process had in memory, PyTorch included |
| chars/s | of a single text, best of three turns; ours and x-transformers with cached state, others anew for every byte |
"""

import argparse
import json
import lzma
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # else `data` would be the script beside this one

import torch

from data.corpus import Corpus
from data.filesystem import available_threads
from pipeline import open_run
from pipeline.config import SampleOptions, load_options
from pipeline.experiments.ours.packaged import RATES, batch_of, endless
from pipeline.experiments.ours.packages import PACKAGES
from pipeline.experiments.ours.systems import ARMS
from pipeline.run.metrics import read_metrics
from pipeline.run.opened import count_characters
from pipeline.train.timing import lift_other_limits, measure_step_seconds, run_phase_steps

# Preset, phases, and what makes it as large as the others, two to three million parameters beside tables.
SYSTEMS = {arm.name: (arm.preset, arm.phases, list(arm.options)) for arm in ARMS}
SMALLEST, LARGEST = 2e6, 3e6  # parameters
BEGIN, END = "<!-- benchmarks/systems.py: begin -->", "<!-- benchmarks/systems.py: end -->"
REFERENCE = "x-transformers"  # of a clock; nothing here changes it
Result = dict[str, Any]


def prepared(corpus: str, place: Path) -> Path:
    """A folder with train.txt, valid.txt and test.txt of a corpus, which may be given with a number of millions of bytes."""
    source, _, megabytes = corpus.partition(":")
    folder = place / (Path(source).resolve().name + (f"-{megabytes}" if megabytes else ""))
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        paths = sorted(path for path in Path(source).glob(f"{split}*.txt*") if path.suffix in (".txt", ".xz"))
        text, most = b"", int(float(megabytes) * (1e6 if split == "train" else 5e4)) if megabytes else None
        for path in paths:
            with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
                text += file.read(-1 if most is None else most - len(text))
        assert text, f"{source} has no {split}*.txt"
        cut = text.rindex(b"\n") + 1 if most is not None and len(text) == most else len(text)
        (folder / f"{split}.txt").write_bytes(text[:cut])
    return folder


def command(*words: str) -> tuple[Result, int]:
    """Runs a Python command; returns the JSON of its last line, if there is one, and the most bytes it had in memory."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(words)}: {said.read()[-1000:]}")
    return json.loads(printed.splitlines()[-1]) if printed else {}, usage.ru_maxrss * 1024


def corpus_of(folder: Path, place: Path) -> list[str]:
    """The options of a corpus."""
    source = ["source.kind=wikitext", f"source.path={folder}", "source.pattern=*.txt"]
    return [*source, f"shards_dir={place}/shards"]


def asked(name: str, folder: Path, place: Path) -> list[str]:
    """The options of a system of ours."""
    preset, phases, sizes = SYSTEMS[name]
    return [
        "--config",
        preset,
        *corpus_of(folder, place),
        *sizes,
        *lift_other_limits(*phases),
        f"runs_dir={place}/runs",
    ]


def sharded(name: str, folder: Path, place: Path) -> str:
    """Where the shards are."""
    words = asked(name if name in SYSTEMS else "flat", folder, place)
    return str(command("-m", "pipeline", "shard", *words, "--json")[0]["folder"])


def clock(names: list[str], folder: Path, place: Path, known: Result) -> Result:
    """The seconds of a step of what is not known yet, on the clock of what is known."""
    names = [name for name in names if not any(each.split("/")[0] == name for each in known)]
    if not names:
        return known
    arms = {}
    with tempfile.TemporaryDirectory(dir=place) as runs:
        for name in dict.fromkeys([REFERENCE, *names]):
            corpus = Corpus.open(sharded(name, folder, place))
            if name in PACKAGES:
                arms[f"{name}/train"] = endless(name, corpus)
                continue
            preset, phases, _ = SYSTEMS[name]
            _, _, *words = asked(name, folder, place)
            for phase in phases:
                options = load_options(preset, [*words, f"{phase}.steps=1000"])
                arms[f"{name}/{phase}"] = run_phase_steps(phase, options, corpus, Path(runs) / name)
        found = measure_step_seconds(arms)
    scale = known[f"{REFERENCE}/train"] / found[f"{REFERENCE}/train"] if known else 1.0
    return {each: seconds * scale for each, seconds in found.items()} | known


def measured(names: list[str], folder: Path, place: Path, known: Result) -> Result:
    """`clock` in a process of its own: what one had in memory, its children seem to have had."""
    asked = f"{names!r}, Path({str(folder)!r}), Path({str(place)!r}), {known!r}"
    code = f"import json; from benchmarks.systems import *; print(json.dumps(clock({asked})))"
    return command("-c", code)[0]


def ours(name: str, folder: Path, seconds: float, seed: int, threads: str, place: Path, clock: Result) -> Result:
    """Trains and scores one of our systems; that of the first seed stays, for sampling."""
    preset, phases, _ = SYSTEMS[name]
    own, run = load_options(preset), run_of(name, folder, seconds, seed)
    total = sum(getattr(own, phase).seconds for phase in phases)
    words = [
        *asked(name, folder, place),
        f"name={run}",
        f"threads={threads}",
        f"seed={seed}",
        "validation.times=8",
        "--json",
    ]
    train, valid = ((folder / f"{split}.txt").read_bytes() for split in ("train", "valid"))
    per_token = len(valid) / count_characters(valid)
    command("-m", "pipeline", "shard", *words)  # not again where they are; the clock may be of another machine
    totals, curve, memory, read_in = {"step": 0.0, "seconds": 0.0, "flops": 0.0}, [], 0, 0.0
    for phase in phases:
        steps = round(getattr(own, phase).seconds / total * seconds / clock[f"{name}/{phase}"])
        trained, most = command("-m", "pipeline", phase, *words, f"{phase}.steps={steps}")
        memory, read_in = max(memory, most), read_in + trained["epochs"] * count_characters(train)
        records = read_metrics(place / "runs" / run / phase / "metrics.jsonl")
        for record in records:
            record["seconds"] = record["step"] * clock[f"{name}/{phase}"]
            if (bits := record.get("validation/bits_per_token")) is not None:
                curve.append([*(totals[key] + record[key] for key in ("seconds", "flops")), bits * per_token])
        for key in totals:
            totals[key] += max(record.get(key, 0.0) for record in records)
    where = str(place / "runs" / run)
    words = ["evaluate.split=valid", "evaluate.yardsticks=false", f"threads={threads}", "--json"]
    found, _ = command("-m", "pipeline", "evaluate", where, *words)
    assert found["bytes"] == len(valid), (found["bytes"], len(valid))
    parameters = sum(parameter.numel() for parameter in open_run(where).system.parameters())
    if seed:
        shutil.rmtree(where)
    figures = {"bits": found["bits_per_char"], "steps": int(totals["step"]), "flops": totals["flops"] / read_in}
    return figures | {"parameters": parameters, "memory": memory, "curve": curve}


def run_of(name: str, folder: Path, seconds: float, seed: int) -> str:
    """The name of a run's folder."""
    return f"{folder.name}-{seconds:g}-{seed}-{name.replace(', ', '-').replace(' ', '-')}"


def sampled(results: list[Result], place: Path) -> list[Result]:
    """Characters per second of those that have none yet and whose run is here, in three turns; lines for the results."""
    runs = {
        key(result): place / "runs" / run_of(result["name"], Path(result["corpus"]), *key(result)[1:3])
        for result in results
    }
    here = [
        result
        for result in results
        if result.get("sampled") is None and (runs[key(result)] / "evaluation.json").exists()
    ]
    rates: dict[Any, list[float]] = defaultdict(list)
    for _ in range(3 if here else 0):
        for result in here:
            found, _ = command("-c", f"from benchmarks.systems import sample; sample({str(runs[key(result)])!r})")
            rates[key(result)].append(found["sampled"])
    known = {result["name"]: result["sampled"] for result in results if result.get("sampled") is not None}
    for result in results:  # of a package the same whatever it was trained on
        name = result["name"]
        if name in PACKAGES and PACKAGES[name].is_there and not result["seed"] and result.get("sampled") is None:
            if name not in known:
                code = f"from pipeline.experiments.ours.packaged import bytes_per_second; print(bytes_per_second({name!r}))"
                known[name] = max(command("-c", code)[0] for _ in range(3))
            here.append(result)
            rates[key(result)] = [known[name]]
    return [identity(result) | {"sampled": max(rates[key(result)])} for result in here]


def sample(run: str, chunks: int = 60) -> None:
    """Prints the characters per second of one text, after a first short one."""
    opened = open_run(run)
    for length in (2, chunks):
        began = time.perf_counter()
        (text,) = opened.sample(" ", 1, SampleOptions(chunks=length))
    print(json.dumps({"sampled": count_characters(text) / (time.perf_counter() - began)}))


def package(
    name: str, corpus: list[str], seconds: float, seed: int, threads: str, rates: list[float], clock: Result
) -> Result:
    """Trains and scores a public package."""
    steps = round(seconds / clock[f"{name}/train"])
    words = ["--steps", str(steps), "--seed", str(seed), "--rates", *map(str, rates), "--threads", threads]
    with tempfile.TemporaryDirectory() as place:
        _, memory = command("-m", "pipeline.experiments.ours.packaged", name, place, *corpus, *words)
        found, scored = (json.loads((Path(place) / f"{file}.json").read_text()) for file in ("package", "evaluation"))
    flops = found["flops"] / steps / (batch_of(PACKAGES[name].context) * PACKAGES[name].context)
    flops *= scored["bytes"] / scored["characters"]
    kept = {key: found[key] for key in ("parameters", "rate")}
    return {"bits": scored["bits_per_char"], "steps": steps, "flops": flops, "memory": memory, "curve": [], **kept}


def identity(result: Result) -> Result:
    return {each: result[each] for each in ("corpus", "seconds", "seed", "name")}


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
            written = [each["sampled"] for each in found if each.get("sampled") is not None]
            shown = f"*{name}*" if name in PACKAGES else name
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
    """Bits on the validation windows against seconds and FLOPs, of the most seconds that most systems have been run for."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    corpora = sorted({result["corpus"] for result in results if result["curve"]})
    colours = dict(zip(SYSTEMS, colormaps["tab20"].colors, strict=False))
    figure = Figure((12.5, 4.2 * len(corpora)), layout="constrained")
    grid = figure.subplots(len(corpora), 2, squeeze=False, sharey="row")
    for row, corpus in zip(grid, corpora, strict=True):
        drawn = {(r["seconds"], r["name"]) for r in results if r["corpus"] == corpus and r["curve"]}
        there = Counter(seconds for seconds, _ in drawn)
        usual = max(there, key=lambda seconds: (there[seconds], seconds))
        shown = [r for r in results if (r["corpus"], r["seconds"]) == (corpus, usual) and r["curve"]]
        for place, (axes, label) in enumerate(zip(row, ("seconds of training", "model FLOPs"), strict=True)):
            for name in SYSTEMS:
                if of := [result for result in shown if result["name"] == name]:
                    curve = min(of, key=lambda result: result["seed"])["curve"]
                    x, bits = ([point[at] for point in curve] for at in (place, 2))
                    axes.plot(x, bits, ".-", color=colours[name], label=name)
            axes.set_xlabel(label)
            if place:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(9, 9)))
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(corpus)
        row[0].set_ylabel("validation, bits/char")
        if shown:
            ends = [result["curve"][-1][2] for result in shown]
            row[0].set_ylim(min(ends) - 0.05, max(ends) + max(0.3, max(ends) - min(ends)))  # not how curves begin
            row[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))  # not over the curves
    figure.savefig(path, dpi=110)


def write(document: Path, results: list[Result]) -> None:
    """Puts the tables between the marks of a document, and the picture beside it."""
    text = document.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    draw(results, document.with_suffix(".png"))
    picture = f"![Bits against seconds and FLOPs]({document.with_suffix('.png').name})"
    document.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n{picture}\n\n{END}{after}", encoding="utf-8")


def read_results(path: Path) -> tuple[dict[str, Result], list[Result]]:
    """The clocks of the corpora, and the runs; lines of one run are put together."""
    clocks: dict[str, Result] = {}
    runs: dict[Any, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if "clock" in (found := json.loads(line)):
            clocks[found["corpus"]] = found["clock"]
        else:
            runs[key(found)] = runs.get(key(found), {}) | found
    return clocks, list(runs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a line of JSON for each finished run")
    parser.add_argument("corpora", nargs="*", metavar="FOLDER[:MEGABYTES]")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="tried for the packages")
    parser.add_argument("--only", nargs="+", choices=[*SYSTEMS, *PACKAGES], default=[*SYSTEMS, *PACKAGES])
    parser.add_argument(
        "--parallel", type=int, default=available_threads(), help="runs side by side, of one thread each"
    )
    parser.add_argument("--place", type=Path, help="folder for corpora, shards and runs (default: that of the results)")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="whose table is to be replaced")
    arguments = parser.parse_args()
    place = arguments.place or arguments.results.resolve().with_suffix("")
    clocks, results = read_results(arguments.results)
    lock = Lock()

    def keep(found: Result) -> None:
        with lock, arguments.results.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def run(folder: Path, seed: int, name: str) -> None:
        wanted: Result = {"corpus": folder.name, "seconds": arguments.seconds, "seed": seed, "name": name}
        if key(wanted) in map(key, results):
            return
        if name in PACKAGES:
            tuned = [r["rate"] for r in results if key(r | {"seed": 0}) == key(wanted | {"seed": 0})]
            rates = tuned[:1] or arguments.rates
            sharded(name, folder, place)
            found = package(name, corpus_of(folder, place), arguments.seconds, seed, "1", rates, clocks[folder.name])
        else:
            found = ours(name, folder, arguments.seconds, seed, "1", place, clocks[folder.name])
        results.append(wanted | found)
        keep(wanted | found)
        wrong = "" if SMALLEST <= found["parameters"] <= LARGEST else ", NOT OF EQUAL SIZE"
        said = f"{found['bits']:.4f} bits/char, {found['parameters']:,} parameters{wrong}"
        print(f"{folder.name} {arguments.seconds:g} s seed {seed} {name}: {said}", flush=True)

    folders = [prepared(corpus, place) for corpus in arguments.corpora]
    for folder in folders:
        known = clocks.get(folder.name, {})
        clocks[folder.name] = measured(arguments.only, folder, place, known)
        if clocks[folder.name] != known:
            cores = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
            keep({"corpus": folder.name, "machine": cores, "clock": clocks[folder.name]})
    for seed in arguments.seeds:  # a seed's packages need the rate that the first one found
        with ThreadPoolExecutor(arguments.parallel) as pool:
            for future in [pool.submit(run, folder, seed, name) for folder in folders for name in arguments.only]:
                future.result()
    for line in sampled(results, place):
        keep(line)
    results = read_results(arguments.results)[1]
    if arguments.write:
        write(arguments.write, results)
    print(markdown(results))


if __name__ == "__main__":
    main()
