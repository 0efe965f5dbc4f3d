"""What a checkpoint costs: time it takes from training, and its size beside weights and moments.

    python benchmarks/saving.py [--config wikitext2] [--repeats 9] [--steps 12] [key=value …]

Some steps after a save against as many without one, interleaved, after warm-up; medians. The time that a save takes from
training is its call (copies) and what its writing in the background slows the steps down by.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

from pipeline.config import load_options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import setup_compute
from pipeline.run.shards import shard_source
from pipeline.train.stages import build_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="wikitext2")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = load_options(arguments.config, ["source.kind=stdlib", f"shards_dir={folder}", *arguments.overrides])
        checkpoints = Checkpoints(Path(folder) / "checkpoints")
        corpus = shard_source(options)
        trainer = build_trainer(options.pretrain, options, corpus, checkpoints, setup_compute(options), lambda: False)
        batches = trainer.prepare_batches()

        def spent(save: bool) -> tuple[float, float]:
            began = time.perf_counter()
            if save:
                trainer.position.step += 1
                trainer._save_checkpoint()
            called = time.perf_counter()
            for _ in range(arguments.steps):
                trainer.step(next(batches))
            checkpoints.wait_until_written()
            return called - began, time.perf_counter() - began

        spent(True)
        pairs = [(spent(False), spent(True)) for _ in range(arguments.repeats)]
        call = statistics.median(saved[0] for _, saved in pairs)
        plain, saved = (statistics.median(pair[which][1] for pair in pairs) for which in (0, 1))
        newest = checkpoints.latest_path()
        assert newest is not None
        size = sum(path.stat().st_size for path in newest.iterdir())
        held = sum(p.numel() * p.element_size() for p in trainer.objective.system.parameters())
        held += sum(
            x.numel() * x.element_size()
            for moments in trainer.learner.optimizer.state.values()
            for x in moments.values()
        )
    print(
        f"{arguments.steps} steps {plain:.3f} s, with a save {saved:.3f} s: {saved - plain:.3f} s more, of which "
        f"{call:.3f} s in the call; {(saved - plain) / 60:.2%} of training at one a minute"
    )
    print(f"checkpoint {size / 1e6:.1f} MB, weights and moments {held / 1e6:.1f} MB: {size / held:.3f}")


if __name__ == "__main__":
    main()
