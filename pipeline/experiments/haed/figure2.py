"""HAED, Figure 2: how large the encoder has to be, and an MLP in its place."""

from pipeline.experiments.experiment import Arm, Experiment


def arms(preset: str, units: dict[str, int], width: int) -> tuple[Arm, ...]:
    """Return LSTM encoders of different widths, cut or padded to the width of the main model, and an MLP of 256."""
    lstms = (
        Arm(name, preset, (f"model.encoder.hidden={n}", f"model.encoder.width={min(n, width)}"), only=("train",))
        for name, n in units.items()
    )
    sizes = ("kind=mlp", "layers=2", "hidden=256", "width=256", "output=relu")  # as in the paper's other experiments
    mlp = tuple(f"model.encoder.{each}" for each in sizes)
    return (*lstms, Arm("MLP", preset, mlp, only=("train",)))


def named(*units: int) -> dict[str, int]:
    """Return the sizes by the name of their arm."""
    return {f"LSTM, {n} units": n for n in units}


FIGURE2 = Experiment(
    name="haed-figure2",
    source="Mujika 2023, Figure 2",
    question="units of an LSTM encoder, and an MLP (the cross), on as much data",
    arms=arms("hred-transformer", named(16, 64, 256, 512), 256),
    claim="an encoder that holds the chunk is better than a small one, a larger one no better than that, and an MLP is "
    "such a one",
    better=(("LSTM, 256 units", "LSTM, 16 units"), ("MLP", "LSTM, 16 units")),
    no_better=(("LSTM, 512 units", "LSTM, 256 units"),),
    full=arms("paper-hred-transformer-wikitext103", named(16, 64, 256, 512, 1024), 356),  # units of our choice
)
