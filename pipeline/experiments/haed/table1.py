"""HAED, Table 1: an LSTM or a transformer between encoder and decoder."""

from pipeline.experiments.experiment import Arm, Experiment

PICTURES = ("batch.sequences=1", "batch.context=256", "chunker.k=12")
MODELS = {"HRED": ("hred", 1.52, 4.13), "HRED with transformer": ("hred-transformer", 1.37, 4.05)}


def arms(text: str, pictures: str, *options: str) -> tuple[Arm, ...]:
    """Return both models end to end, on text and on images, by the pattern of their presets' names."""
    found = []
    for name, (model, bits_per_token, bits_per_dim) in MODELS.items():
        found.append(Arm(name, text % model, (), {"WikiText-103 or ImageNet32": bits_per_token}, "text", ("train",)))
        paper = {"WikiText-103 or ImageNet32": bits_per_dim}
        found.append(Arm(f"{name}, pictures", pictures % model, options, paper, "pictures", ("train",)))
    return tuple(found)


TABLE1 = Experiment(
    name="haed-table1",
    source="Mujika 2023, Table 1",
    question="HRED with an LSTM as its main model, and with a transformer, end to end on as much data",
    arms=arms("%s", "%s", *PICTURES),
    claim="the transformer is better on both",
    better=(("HRED with transformer", "HRED"), ("HRED with transformer, pictures", "HRED, pictures")),
    full=arms("paper-%s-wikitext103", "paper-%s-imagenet32"),
)
