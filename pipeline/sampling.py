"""The stage `sample`: continuations of prompts, printed and kept for the report."""

from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.inference import Run
from pipeline.options import Options
from pipeline.runs import RunFolder


@dataclass
class Sample:
    """A prompt and its continuation; bytes that are not UTF-8 are shown as hexadecimal escapes."""

    prompt: str
    text: str


def sample(options: Options, prompts: list[str] | None = None, samples: int = 1) -> list[Sample]:
    """Continues prompts, by default those of `sample.prompts`, which are also written to samples.json.

    Raises:
        FileNotFoundError: no such run, or nothing was trained in it.
    """
    folder = RunFolder.find(Path(options.runs_dir) / options.name)
    run = Run(folder, options)
    written = [
        Sample(prompt, text.decode("utf-8", errors="backslashreplace"))
        for prompt in (options.sample.prompts if prompts is None else prompts)
        for text in run.sample(prompt, samples, options.sample)
    ]
    if prompts is None:
        folder.write_json("samples.json", [asdict(item) for item in written])
    return written
