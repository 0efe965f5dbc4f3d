"""How far a step's log q is from the exact one: its normaliser is estimated from sampled candidates, evaluation has all.

    python benchmarks/normaliser.py RUN [--phase finetune] [--steps 100] [--counted 0] [key=value ...]

Takes the newest checkpoint of a phase of a mixed run, with its counts, and the batches that would come next; weights stay as
they are. Of every chunk that is known, log q as the step has it (`haed.iem.objective.target_log_prob`) less log q over all known
chunks (`haed.chunk.mixture.VocabularyScorer`), in nats: means with their standard errors over steps, the deviation over chunks, and of
g · q / P, the share of the score in the mixture, by which the decoder's gradient is weighed, the mean of each. With --counted the
candidates of so many more steps are counted first. Nothing is written, nothing is asserted.
"""

import argparse
import math
import sys
from itertools import islice
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch
from torch import Tensor

from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.iem.objective import ChunkObjective
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import setup_compute
from pipeline.run.run_directory import RunFolder
from pipeline.run.windows import as_windows
from pipeline.train.stages import build_trainer
from pipeline.train.trainer import restore_checkpoint

KINDS = {"2–9": (2, 10), "10–99": (10, 100), "100–999": (100, 1000), "1,000–": (1000, 1 << 62)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--phase", default="finetune", choices=("pretrain", "finetune"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--counted", type=int, default=0)
    given, more = parser.parse_known_args()
    folder = RunFolder.find(given.run)
    options = folder.load_options(more)
    checkpoints = Checkpoints(folder.phase_folder(given.phase) / "checkpoints")
    trainer = build_trainer(
        getattr(options, given.phase), options, folder.open_corpus(), checkpoints, setup_compute(options), lambda: False
    )
    newest, objective = checkpoints.load_newest(), trainer.objective
    assert newest is not None and isinstance(objective, ChunkObjective) and objective.lexicon is not None
    restore_checkpoint(trainer.learner, newest, options)
    model, lexicon = objective.system.eval(), objective.lexicon
    assert isinstance(model, HAED) and model.mixture is not None
    known, told = model.embed_vocabulary(lexicon), list[Tensor]()
    mix = objective._mixture_loss

    def kept(losses, batch, log_q, predictions, scores):  # type: ignore[no-untyped-def]
        told.append(log_q)
        return mix(losses, batch, log_q, predictions, scores)

    objective._mixture_loss = kept  # type: ignore[method-assign]
    gaps, counts, shares = list[Tensor](), list[Tensor](), list[Tensor]()
    assert objective.candidates is not None
    for batch in islice(trainer.learner.loader, given.counted):
        objective.candidates.candidates_for_windows(as_windows(batch), None)
    for batch in islice(trainer.learner.loader, given.steps):
        windows = as_windows(batch)
        objective(objective.prepare_batch(windows))
        chunks = Chunks(windows.tokens, windows.lengths)[windows.chunk_mask]
        prediction, rows = model.predict_vectors(windows), lexicon.find_rows(chunks)
        exact = known.log_softmax(model.compute_query(prediction), rows, model.mixture.prior)
        gate, decoder = model.mixture(prediction), model.decision_log_likelihood(windows)[windows.chunk_mask].sum(1)
        odds = gate - decoder
        shares.append(torch.stack([(odds + q).sigmoid() for q in (told[-1], exact)], 1)[rows >= 0])
        gaps.append((told[-1] - exact)[rows >= 0])
        counts.append(lexicon.counts_of(chunks)[0][rows >= 0])
    gap, count, share = (torch.cat(each).double() for each in (gaps, counts, shares))
    of_step = torch.stack([each.double().mean() for each in gaps])
    print(f"{newest.path}: {len(gaps)} steps, {len(gap):,} chunks, {objective.candidates.windows:,.0f} windows counted")
    print(f"log q of the step less the exact one: {gap.mean():+.4f} ± {of_step.std() / math.sqrt(len(gaps)):.4f} nats")
    print(f"  of a chunk: deviation {gap.std():.3f}; of a step's mean: {of_step.std():.3f}")
    for name, (least, below) in KINDS.items():
        some = gap[(count >= least) & (count < below)]
        print(f"  {name} in the train split: {some.mean():+.4f}, deviation {some.std():.3f} ({len(some):,})")
    print(f"share of the score in the mixture: {share[:, 0].mean():.4f} in the step, {share[:, 1].mean():.4f} exactly")


if __name__ == "__main__":
    main()
