"""CONTRIBUTING.md: its encoder, source and chunker of one's own and its term of the loss, as they stand there."""

import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import TypeAdapter

from data.corpus import Corpus
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.options import ENCODERS, LOSS_TERMS, EncoderOptions, ModelOptions
from pipeline import open_run
from pipeline.cli import main
from pipeline.config import ConfigError, Options, check_options, check_training, dump_options, load_options
from pipeline.config.schema import option_classes, option_names, schema_options
from pipeline.run.metrics import read_metrics
from pipeline.run.sharding import open_shards
from pipeline.run.system import build_system
from pipeline.training.stages import train
from tests.conftest import mostly_nightly

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BAG = ["model.encoder.kind=bag"]


def find_section(title: str) -> str:
    return TEXT.partition(f"## How do I add {title}\n")[2].partition("\n## ")[0]


def find_block(title: str, language: str) -> str:
    """The block of code of a section."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", find_section(title), re.DOTALL)
    return str(block)


def install(place: Path, module: str, title: str) -> None:
    """Install the package of a section."""
    points = re.sub(r'project\.entry-points\."(.*)"', r"\1", find_block(title, "toml")).replace('"', "")
    (info := place / f"{module}-1.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(points)
    (place / f"{module}.py").write_text(find_block(title, "python"))


def forget_packages(*modules: str) -> None:
    """Take back what packages have registered in this process."""
    for module in modules:
        sys.modules.pop(module, None)
    option_classes.clear()
    for remembered in (schema_options, option_names):
        remembered.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages with the encoder, the source and the term; what they register in this process is taken back."""
    install(tmp_path / "packages", "my_encoder", "a chunk encoder")
    install(tmp_path / "packages", "my_haed", "a source")
    install(tmp_path / "packages", "my_terms", "a term of the loss")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    yield
    forget_packages("my_encoder", "my_haed", "my_terms")


@pytest.mark.usefixtures("installed")
def test_an_encoder_of_ones_own_is_trained_with_an_option_of_its_own(
    options: Options, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, *BAG, "model.encoder.power=0.5", "name=bag", "pretrain.steps=2", "validation.times=0"]
    assert main(["pretrain", "--config", "quickstart", *words]) == 0
    messages = capsys.readouterr().err
    assert "model.encoder." not in messages and "no effect with model.decoder.kind=lstm" in messages
    run = open_run("bag", options.runs_dir)
    assert run.system.encoder.power == 0.5 and type(run.system.encoder).__name__ == "BagEncoder"
    folder = Path(options.runs_dir) / "bag"
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["encoder"]["power"] == 0.5
    assert main(["pretrain", str(folder), "pretrain.steps=3"]) == 0  # goes on from there


@pytest.mark.usefixtures("installed")
def test_its_options_are_listed_checked_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="^model.encoder.power belongs to model.encoder.kind=bag. Leave it out, or"):
        load_options("quickstart", ["model.encoder.power=1"])
    assert main(["config", "quickstart", *BAG]) == 0
    assert "    power: 1.0\n" in capsys.readouterr().out
    options = load_options("quickstart", [*BAG, "model.encoder.power=0.25"])
    assert isinstance(options.model.encoder, EncoderOptions)
    path = tmp_path / "config.yaml"
    path.write_text(dump_options(options))
    assert load_options(path) == options == check_options(options)
    assert "bag" in TypeAdapter(ModelOptions).json_schema()["$defs"]["EncoderOptions"]["properties"]["kind"]["enum"]
    assert "power" not in dump_options(load_options("quickstart"))


OURS = ", ".join(ENCODERS)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*BAG, "model.encoder.power=2"], "model.encoder.power=2: input should be less than or equal to 1"),
        ([*BAG, "model.encoder.power=a"], "model.encoder.power=a: is not a number"),
        ([*BAG, "model.encoder.powr=1"], "there is no option model.encoder.powr; did you mean model.encoder.power=1"),
        ([*BAG, "model.encoder.width=0"], "model.encoder.width=0: input should be greater than or equal to 1"),
        (["model.encoder.kind=bagg"], f".* expected one of {OURS}, bag. Write model.encoder.kind=bag"),
        (["source.kind=sqlite", "source.table=a b"], r"source.table='a b': string should match pattern '\^\\w\+\$'"),
    ],
)
def test_a_wrong_option_of_a_package_is_told_what_is_right(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_options("quickstart", words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (*BAG, f"kind=bag: expected one of {OURS}. For a kind of your own, install"),
        ("model.encoder.power=1", "there is no option model.encoder.power"),
    ],
)
def test_without_its_package_a_kind_is_not_known(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_options("quickstart", [word])


@pytest.mark.usefixtures("installed")
def test_a_term_of_ones_own_is_trained_recorded_and_weighted(options: Options, tiny: list[str]) -> None:
    def pretrain(name: str, *words: str) -> list[dict[str, float]]:
        few = ["pretrain.steps=3", "validation.times=0", "log_steps=1", "precision=fp32", f"name={name}"]
        assert main(["pretrain", "--config", "quickstart", *tiny, *few, *words]) == 0
        return read_metrics(Path(options.runs_dir) / name / "pretrain" / "metrics.jsonl")

    without, with_term = pretrain("without"), pretrain("with", "iem.terms=[2*center]")
    assert "iem_center" not in without[0] and with_term[0]["iem_center"] > 0
    assert with_term[0]["loss"] == pytest.approx(without[0]["loss"] + 2 * with_term[0]["iem_center"], rel=1e-5)
    strong, weak = pretrain("strong", "iem.terms=[1e3*center]"), pretrain("weak", "iem.terms=[1e-9*center]")
    assert strong[-1]["iem_center"] < weak[-1]["iem_center"]


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return None", "iem.terms: mine returned None, expected a scalar tensor"),
        ("return inputs.keys", ", 16) of torch."),
        ("return inputs.keys.sum() + 0 * inputs.keys", "expected a scalar tensor with a gradient"),
        ("return inputs.keys.sum().detach()", "iem.terms: mine returned () of torch."),
        ("return inputs.embeddings.sum() * float('nan')", "The loss without mine of iem.terms is finite. Mend what"),
    ],
)
def test_a_term_that_returns_no_number_is_named(
    code: str, message: str, place: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(place, "loss_terms", f"def compute_mine(inputs):\n    {code}\n", "mine = my_kind:compute_mine")
    assert main(["pretrain", "--config", "quickstart", *tiny, "iem.terms=[2*mine]"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("center", r"'center': expected WEIGHT\*NAME, such as 0.01\*center"),
        ("1e999*center", "expected WEIGHT"),
        ("-1*center", "A weight is 0 or more"),
        ("1*center,2*center", "a term is given twice"),
    ],
)
def test_a_term_that_cannot_be_read_is_refused(term: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_options("quickstart", [f"iem.terms=[{term}]"])


@pytest.mark.usefixtures("installed")
def test_a_term_that_there_is_not_is_refused_where_it_would_be_trained_and_nowhere_else() -> None:
    options = load_options("quickstart", ["iem.terms=[1*centre]"])
    with pytest.raises(ConfigError, match="there is no term centre; expected one of center. Install the package"):
        check_training("pretrain", options)
    options.finetune.iem_weight = 0
    check_training("finetune", options)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("mine = nothing:here", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("mine = my_kind:missing", "cannot be loaded: AttributeError"),
        ("mine = my_kind:number", "is 3, expected a function"),
        ("mine = my_exit:term", "cannot be loaded: SystemExit: no licence"),
    ],
)
def test_a_term_that_cannot_be_loaded_is_named_before_anything_is_done(entry: str, message: str, place: Path) -> None:
    add_package(place, "loss_terms", "number = 3\n", entry)
    (place / "my_exit.py").write_text("raise SystemExit('no licence')\n")
    with pytest.raises(ConfigError, match=f"iem.terms: mine of haed.loss_terms {message}"):
        check_training("pretrain", load_options("quickstart", ["iem.terms=[2*mine]"]))


def test_a_term_does_not_hide_a_metric_and_a_list_is_not_advised_as_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSS_TERMS, "list_names", lambda: ["accuracy", "spread_of_keys"])
    with pytest.raises(ConfigError, match="iem_accuracy is a metric of the loss itself"):
        load_options("quickstart", ["iem.terms=[1*accuracy]"])
    with pytest.raises(ConfigError, match="expected one of accuracy, spread_of_keys. Install"):
        check_training("pretrain", load_options("quickstart", ["iem.terms=[1*spread_of_keyz]"]))


@pytest.mark.parametrize("workers", mostly_nightly([1, 2], 2))
def test_a_source_and_a_chunker_of_ones_own(tmp_path: Path, workers: int) -> None:
    bodies = [f"TheText number{i}OfMany " * (i % 50 + 1) for i in range(2500)]
    with sqlite3.connect(tmp_path / "notes.db") as database:
        database.execute("CREATE TABLE notes (body TEXT)")
        database.executemany("INSERT INTO notes VALUES (?)", [(body,) for body in [None, "", *bodies]])
    database.close()
    install(tmp_path / "packages", "my_haed", "a source")
    _, *words = shlex.split(find_block("a source", "bash"))
    command = [sys.executable, "-m", "pipeline", *words, "shard.megabytes=1", f"shard.workers={workers}"]
    places = os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": places}, check=True, capture_output=True)
    (folder,) = tmp_path.glob("shards/notes.db-*")
    corpus = Corpus.open(folder)
    documents = (document for split in ("train", "valid", "test") for document in corpus.iterate_documents(split))
    assert sorted(tokens.tobytes().decode() for tokens, _ in documents) == sorted(bodies)
    lengths = corpus.manifest["statistics"]["train"]["chunk_lengths"]
    assert len(lengths) == 13 and lengths[4] == 0 < lengths[3]  # "The", and what follows capped at 12


def test_a_token_beyond_the_vocabulary_of_ones_own_chunker_is_refused_wherever_a_text_comes_in(
    place: Path, options: Options, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from data.chunkers import FixedChunker\n\nclass Mine(FixedChunker):\n    vocabulary = 128\n"
    add_package(place, "chunkers", code)
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_text(f"plain letters of {split} alone. " * 400)
    made = [*tiny, "chunker.kind=mine", "source.kind=text", f"source.path={text}", "train.steps=1", "name=mine"]
    assert main(["shard", *made]) == 0 and train(load_options("quickstart", made)).steps == 1
    run = open_run("mine", options.runs_dir)
    for refused in (lambda: run.score("é"), lambda: run.next("é"), lambda: run.sample("é"), lambda: run.embed("é")):
        with pytest.raises(ValueError, match="a token is 195, but this run's model knows those below 128 alone"):
            refused()
    (tmp_path / "later.txt").write_text("é")
    assert main(["evaluate", run.folder.path.as_posix(), "--text", str(tmp_path / "later.txt")]) == 1
    assert "knows those below 128 alone. Leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "title"), [("write-an-encoder.md", "a chunk encoder"), ("write-a-source.md", "a source")]
)
def test_the_site_includes_a_section_as_a_page(page: str, title: str) -> None:
    included = (ROOT / "docs" / "how-to" / page).read_text()
    (name,) = re.findall(r'^--8<-- "CONTRIBUTING.md:(\w+)"$', included, re.MULTILINE)
    begin, end = (f"<!-- --8<-- [{each}:{name}] -->" for each in ("start", "end"))
    section = find_section(title).strip()
    assert section.startswith(begin) and section.endswith(end)
    assert not re.search(r"\]\((?!http)", section)  # a relative link would be another one in the page


def add_package(place: Path, group: str, code: str, entries: str = "mine = my_kind:Mine") -> None:
    """Install a package `mine` with one module, my_kind, and its entry points."""
    (info := place / "mine-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[haed.{group}]\n{entries}\n")
    (place / "my_kind.py").write_text(code)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages of other people."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget_packages("my_kind")


def test_a_kind_with_the_name_of_one_of_ours_is_named_where_it_is_chosen(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_package(place, "sources", "", "text = my_kind:Text")
    load_options("quickstart", log_changes=True)
    assert "my_kind" not in caplog.text
    load_options("quickstart", ["source.kind=text"], log_changes=True)
    (warning,) = (line for line in caplog.messages if "my_kind" in line)
    assert warning == "source.kind=text is a kind of haed, so my_kind:Text of mine is not used. Rename it"


@pytest.mark.parametrize("code", ["import nothing_of_that_name", "raise SystemExit('no licence')"])
def test_a_package_that_cannot_be_loaded_is_named(code: str, place: Path) -> None:
    add_package(place, "sources", code)
    match = "^source.kind=mine: my_kind:Mine of mine cannot be loaded: (ModuleNotFound|SystemExit: no licence)"
    with pytest.raises(ConfigError, match=match):
        load_options("quickstart", ["source.kind=mine"])


# A source whose module also has a chunker, and a term with a name that stands within words of messages.
FAILING = """
from data.chunkers import WordChunker
from data.sources.text import TextSource

class Cut(WordChunker): ...
class one: ...
class Mine(TextSource):
    def inputs(self{parameters}):
        return {value}
"""
POINTS = "mine = my_kind:Mine\n[haed.chunkers]\ncut = my_kind:Cut\n[haed.encoders]\nany = my_kind:Any\n"
POINTS += "[haed.loss_terms]\none = my_kind:one"


@pytest.mark.parametrize(
    ("parameters", "value", "where", "kind"),
    [
        pytest.param(", size, align", "{}['x']", ", line 9", "KeyError", id="a line of its own"),
        pytest.param(", size, align", "None + 1", ", line 9", "TypeError", id="one stands in NoneType"),
        pytest.param("", "()", "", "TypeError", id="what calls it"),
    ],
)
def test_an_error_of_another_package_names_its_class_and_line(
    parameters: str, value: str, where: str, kind: str, place: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(place, "sources", FAILING.format(parameters=parameters, value=value), POINTS)
    assert main(["shard", *tiny, "source.kind=mine", "chunker.kind=cut"]) == 1
    assert f"(in my_kind:Mine of mine, {place / 'my_kind.py'}{where}) ({kind}; --debug" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return None", "read returned None. It must yield a Piece for each document"),
        ("yield ('a', 'train', b'a')", "read yielded ('a', 'train', b'a'), expected a Piece"),
        ("yield Piece('a', 'train', 'text')", "gave a data of type str, expected bytes"),
        ("yield Piece('a', 'val', b'text')", "gave a split 'val', expected train, valid, test"),
        (
            "yield Piece('a', 'train', b'text', True)",
            "gave a a piece that continues another document or split, or none",
        ),
    ],
)
def test_what_a_source_reads_is_checked(
    code: str, message: str, place: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    head = "from data.sources.source import Piece\nfrom data.sources.text import TextSource\n\n\n"
    source = f"{head}class Mine(TextSource):\n    def read(self, item):\n        {code}\n"
    add_package(place, "sources", source)
    for newlines in ("keep", "lf"):
        assert main(["shard", *tiny, "source.kind=mine", f"source.newlines={newlines}"]) == 1
        assert message in capsys.readouterr().err


KEEP_FIRST = """
def keep_first(state):
    select_rows = state.select_rows
    state.select_rows = lambda rows: select_rows(torch.arange(len(rows)))
    return state
"""
BASES = {"encoder": "MLPEncoder", "main": "LSTMMain", "decoder": "TransformerDecoder"}


def add_part(place: Path, part: str, **methods: str) -> None:
    """Install a part like one of ours, but for what some methods return: `right` is what ours return for `given`."""
    code = f"import torch\nfrom haed.chunk.{part} import {BASES[part]}\n{KEEP_FIRST}\n\nclass Mine({BASES[part]}):\n    pass\n"
    for name, returned in methods.items():
        code += f"    def {name}(self, *given):\n        right = super().{name}(*given)\n        return {returned}\n"
    add_package(place, f"{part}s", code)


@pytest.mark.parametrize(("part", "chunker"), [("main", "words"), ("decoder", "words"), ("decoder", "fixed")])
def test_a_part_of_ones_own_is_trained(part: str, chunker: str, place: Path, options: Options, tiny: list[str]) -> None:
    add_part(place, part)
    made = [*tiny, f"chunker.kind={chunker}", f"model.{part}.kind=mine", "train.steps=1", "name=mine"]
    assert main(["shard", *made]) == 0 and train(load_options("quickstart", made)).steps == 1


LATER = "Mine: a prediction depends on its own chunk or a later one"
OTHER_LOGITS = "Mine: `step` gives other logits"


@pytest.mark.parametrize(
    ("part", "methods", "message"),
    [
        (
            "encoder",
            {"embed_tokens": "right - right.mean(0)"},
            "Mine: the vector of a chunk depends on the other chunks",
        ),
        (
            "main",
            {"step": "right[..., :-1]"},
            r"Mine returned \(2, 4, 15\) of torch.float32, expected \(2, 4, 16\): windows",
        ),
        ("main", {"step": "[]"}, r"Mine returned \[\], expected \(2, 4, 16\): windows × chunks"),
        ("main", {"step": "right + given[0].mean()"}, LATER),
        ("main", {"step": "right.flip(1)"}, LATER),
        (
            "main",
            {"step": "right + given[0][-1:].mean(2).cumsum(1)[..., None]"},
            "a prediction depends on other windows",
        ),
        ("main", {"step": "right + 0 * given[0][0, 0, 0]"}, "Mine fails without any chunk, as in a rank"),
        ("main", {"step": "super().step(given[0], {})"}, "Mine: `step` with a cache predicts otherwise than `forward`"),
        ("main", {"parameters_by_depth": "right[1:]"}, "in no group, .* trained: .*main.*parameters_by_depth"),
        (
            "decoder",
            {"forward": "right[:, 1:]"},
            r"Mine returned .*, expected \(\d+, 257\): decisions × \(symbols, and the end",
        ),
        ("decoder", {"forward": "None"}, "Mine returned None, expected"),
        ("decoder", {"forward": "right + given[1].targets[:, None].float() * torch.arange(257)"}, OTHER_LOGITS),
        ("decoder", {"forward": "right - right.mean(0)"}, OTHER_LOGITS),
        ("decoder", {"forward": "right - right.mean(0)", "step": "right - right.mean(0)"}, OTHER_LOGITS),
        ("decoder", {"step": "right[:, :-1]"}, OTHER_LOGITS),
        ("decoder", {"forward": "super().forward(given[0][given[1].order], given[1])"}, OTHER_LOGITS),
        ("decoder", {"initial_state": "keep_first(right)"}, OTHER_LOGITS),
        ("decoder", {"initial_state": "[]"}, r"Mine: initial_state returned \[\], expected a state with select_rows"),
        ("decoder", {"forward": "right * float('nan')"}, "Mine returned a number that is infinite or NaN"),
        ("encoder", {"embed_tokens": "right / 0 * 0"}, "Mine returned a number that is infinite or NaN"),
    ],
)
def test_a_part_of_ones_own_is_tried_before_it_is_trained(
    part: str, methods: dict[str, str], message: str, place: Path, options: Options, tiny: list[str]
) -> None:
    add_part(place, part, **methods)
    with pytest.raises(ValueError, match=message):
        train(load_options("quickstart", [*tiny, f"model.{part}.kind=mine", "train.steps=1", "name=mine"]))


SUM = """
import torch
from torch import nn
from haed.chunk.encoder import Encoder

class Mine(Encoder):
    def __init__(self, options, k, vocabulary, bias=True):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, options.width)
        self.up = nn.Linear(options.width, options.width)
        self.add_output_layers(options, bias)

    def initialise_parameters(self):
        nn.init.eye_(self.up.weight)

    def embed_tokens(self, inputs):
        assert inputs.tokens.dtype == inputs.lengths.dtype == torch.int64
        real = torch.arange(inputs.tokens.shape[1]) < inputs.lengths[:, None]
        found = self.up(self.tokens(inputs.tokens[real]))
        return found.new_zeros(len(inputs), self.width).index_add(0, real.nonzero()[:, 0], found)
"""


def test_an_encoder_of_ones_own_keeps_its_initial_values_reads_int64_and_is_counted_by_length(
    place: Path, options: Options, tiny: list[str]
) -> None:
    add_package(place, "encoders", SUM)
    made = load_options("quickstart", [*tiny, "model.encoder.kind=mine", "train.steps=2", "name=mine"])
    trained = train(made)
    system = build_system(made, open_shards(made).build_chunker())
    assert trained.steps == 2 and isinstance(system, HAED)
    assert torch.equal(system.encoder.up.weight, torch.eye(system.encoder.width))  # type: ignore[arg-type]
    chunks = Chunks(torch.ones(3, system.cut.k, dtype=torch.uint8), torch.tensor([1, 4, 4], dtype=torch.uint8))
    assert system.encoder.prepare_inputs(chunks).sizes == [3, 2, 2, 2, *[0] * (system.cut.k - 4)]
    flops = system.chunk_flops("encoder", [[3, 2, 2, 2]])
    assert 9 * 2 * system.encoder.width**2 <= flops <= 9 * 2 * system.encoder.width**2 + 3 * 20 * system.encoder.width


def test_a_part_that_is_no_class_of_its_base_is_named(place: Path, options: Options, tiny: list[str]) -> None:
    add_package(place, "decoders", "def Mine(*given):\n    return None\n")
    with pytest.raises(
        ValueError, match="mine of haed.decoders is <function Mine.*, expected a class derived from Decoder"
    ):
        train(load_options("quickstart", [*tiny, "model.decoder.kind=mine", "train.steps=1", "name=mine"]))


@pytest.mark.parametrize(
    "code", ["from haed.chunk.encoder import MLPEncoder as Mine", "class Mine:\n    options_class = int"]
)
def test_a_kind_with_the_options_of_another_part_is_refused(code: str, place: Path) -> None:
    add_package(place, "mains", code)
    with pytest.raises(ConfigError, match="model.main.kind=mine: options_class of .* inherits from MainOptions"):
        load_options("quickstart", ["model.main.kind=mine"])
