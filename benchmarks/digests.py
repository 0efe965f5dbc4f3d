"""Print digests of the weights after 30 steps of every phase of three presets at reduced size.

    python benchmarks/digests.py OUT [--text FOLDER] [--threads 2]

Run it before and after a change on one machine (two threads, float32), and compare the lines, one for each checkpoint
kept. If they are equal, the change alters no bit. Text is the standard library's by default, and pictures are drawn from
a seed. Text takes a minute, pictures ten.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
SMALL = "precision=fp32 batch.sequences=4 batch.context=32 validation.windows=8 validation.times=2".split()
LIMITS = [f"{phase}.{limit}" for phase in ("pretrain", "finetune", "train") for limit in ("seconds=null", "steps=30")]


def draw_pictures(folder: Path) -> Path:
    """Write 450 pictures of coloured squares, and return their folder."""
    chance = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 400), ("val", 50)):
        squares = chance.integers(0, 200, (count, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
        raster = (squares + chance.integers(0, 30, squares.shape)).astype(np.uint8)
        np.savez(folder / f"{split}_data.npz", data=raster.reshape(count, -1), labels=np.zeros(count, np.int64))
    return folder


def digest_tensors(file: Path) -> str:
    """Return a digest of the names and values of the tensors in a file."""
    checksum = hashlib.sha256()
    with safe_open(file, "pt") as tensors:
        for name in sorted(tensors.keys()):
            checksum.update(name.encode() + tensors.get_tensor(name).numpy().tobytes())
    return checksum.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="of each process, whatever OMP_NUM_THREADS says")
    parser.add_argument("--text", type=Path, help="folder of texts, by default the standard library")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    text = ["source.kind=text", f"source.path={arguments.text.resolve()}"] if arguments.text else ["source.kind=stdlib"]
    drawn = ["source.kind=images", f"source.path={draw_pictures(out / 'pictures')}", "source.pattern=*.npz"]
    drawn += ["batch.context=256", "batch.sequences=2"]
    sources = {"quickstart": text, "wikitext2": text, "paper-imagenet32": drawn}
    places = [f"runs_dir={out}/runs", f"shards_dir={out}/shards", f"threads={arguments.threads}"]
    for preset, source in sources.items():
        common = [*SMALL, *LIMITS, *source, "optimizer.warmup_steps=5", *places]
        for stage in ("shard", "pretrain", "finetune", "train"):
            name = f"name={preset}-{stage}" if stage == "train" else f"name={preset}"
            command = [sys.executable, "-m", "pipeline", stage, "--config", preset, *common, name]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)}\n{done.stderr}")
        for file in sorted(out.glob(f"runs/{preset}*/*/checkpoints/step-*/model.safetensors")):
            print(digest_tensors(file), file.relative_to(out / "runs").parent, flush=True)


if __name__ == "__main__":
    main()
