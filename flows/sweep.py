"""The flow `sweep`: a run of all stages for each combination of values, as a flow run of its own.

Every combination is checked before any run is started. The runs then wait for their turns like other trainings, and each
can be cancelled and retried alone. A retry of the sweep starts none twice.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from urllib.parse import urlencode

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run

from flows.artifacts import artifact_key, post_markdown
from flows.forms import FormSubmission, check_all_stages, config_flow, join_overrides, read_form
from pipeline.config import (
    ConfigError,
    dump_options,
    flatten_options,
    flatten_tree,
    list_presets,
    load_options,
    write_override,
)
from pipeline.console import markdown_text
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import check_source
from pipeline.web.app import run_list_url, served_page_url

MOST_RUNS = 100
_BASE = "quickstart"
_VALUE = re.compile(r"""\s*(?:"[^"]*"|'[^']*')\s*(?=,|$)|(?:\[[^\]]*\]|\{[^}]*\}|[^,])+""")  # commas within are its own


@dataclass
class SweptRun:
    """A run of a sweep: its name, its values as overrides, and its preset with all of its overrides."""

    name: str
    values: list[str]
    preset: str = ""
    overrides: list[str] = field(default_factory=list)


def list_runs_to_try(name: str, words: Sequence[str]) -> list[SweptRun]:
    """Return a run for each combination of values. The values of the last option vary fastest.

    Args:
        name: name of the sweep, with which the names of its runs begin.
        words: options with their values, such as `seed=0,1,2`.

    Raises:
        ConfigError: there are no values or too many, or two runs would have one name.
    """
    choices: dict[str, dict[str, None]] = {}
    for word in filter(None, words):
        key, sign, texts = word.partition("=")
        choices_of_word = [text.strip() for text in _VALUE.findall(texts) if text.strip()]
        if key.strip() == "name":
            raise ConfigError("values: the names of the runs follow from their values. Leave name= out")
        if not sign or not key.strip() or not choices_of_word:
            raise ConfigError(f"values: {word!r} is not an option with values. Use one such as seed=0,1,2")
        choices.setdefault(key.strip(), {}).update(dict.fromkeys(choices_of_word))
    if not choices:
        raise ConfigError("values: there is nothing to try. Give an option with values, such as seed=0,1,2")
    if (number := math.prod(map(len, choices.values()))) > MOST_RUNS:
        raise ConfigError(f"values: these are {number:,} combinations. Give at most {MOST_RUNS}")
    last = Counter(key.rpartition(".")[2] for key in choices)
    short = {key: part if last[part := key.rpartition(".")[2]] == 1 else key for key in choices}
    runs = []
    for chosen in product(*choices.values()):
        values = dict(zip(choices, chosen, strict=True))
        tail = re.sub(r"[^\w.+]+", "-", "-".join(f"{short[key]}-{value}" for key, value in values.items())).strip("-")
        runs.append(SweptRun(f"{name}-{tail}", [f"{key}={value}" for key, value in values.items()]))
    if twice := [each for each, count in Counter(run.name for run in runs).items() if count > 1]:
        raise ConfigError(f"values: two runs would have the name {twice[0]}. Leave one of their values out")
    return runs


def fix_options(preset: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Return a shipped preset and overrides that give the same options.

    The configuration of a run may change, or its folder be renamed, before a run of a sweep begins.
    """
    if preset in list_presets():
        return preset, overrides
    wanted, usual = flatten_options(load_options(preset, overrides)), dict(flatten_tree(asdict(load_options(_BASE))))
    return _BASE, [write_override(key, value) for key, value in wanted.items() if usual.get(key, usual) != value]


def plan_runs(form: FormSubmission) -> list[SweptRun]:
    """Return the runs of a sweep. The form is read for each, since times are divided among the phases of its model.

    Raises:
        ConfigError: a value is wrong, or two runs would be the same, such as those of seed=1 and seed=01.
        FileNotFoundError: a source does not exist.
        ValueError: a source is empty or not of its kind.
    """
    runs = list_runs_to_try(form.options.name, form.fields["values"])
    typed = [word for word in form.fields["overrides"] if not word.startswith("name=")]
    planned, sources = dict[str, SweptRun](), set[str]()
    for run in runs:
        fields = form.fields | {"preset": form.preset, "name": run.name, "overrides": [*typed, *run.values]}
        _, overrides, values = read_form("haed", fields)
        run.preset, run.overrides = fix_options(form.preset, join_overrides(values, overrides))
        options = load_options(run.preset, run.overrides)
        check_all_stages(options)
        if (source := str((options.source, options.chunker))) not in sources:
            check_source(options)
            sources.add(source)
        same = planned.setdefault(dump_options(replace(options, name="")), run)
        if same is not run:
            ways = f"{', '.join(same.values)} and {', '.join(run.values)}"
            raise ConfigError(f"values: {ways} are the same. Leave one of them out")
    return runs


@config_flow(
    "sweep",
    "preset name source seconds pretrain_seconds finetune_seconds values sources model batch optimizer launcher overrides",
    lambda names: f"{len(names)} run{'s were' if names[1:] else ' was'} started: {', '.join(names)}",
)
def sweep(form: FormSubmission) -> list[str]:
    """Start a run of all stages for each combination of values, such as three learning rates with two seeds.

    The runs take turns. The names of the runs begin with that of the sweep. Compare them in the list of runs.
    """
    runs = plan_runs(form)
    folder = RunFolder.from_options(form.options).path
    tag = f"sweep:{form.options.name}"
    suffix = str(deployment.name or "").removeprefix("sweep-")
    with get_client(sync_client=True) as client:
        try:
            each_run = client.read_deployment_by_name(f"haed/haed-{suffix}").id
        except ObjectNotFound:
            raise ConfigError("a sweep is started from its form in Prefect. Start haed serve, then try again") from None
        lines = []
        for run in runs:
            started = client.create_flow_run_from_deployment(
                each_run,
                parameters={"preset": run.preset, "name": run.name, "overrides": run.overrides},
                name=f"haed {run.name}",  # until it names itself
                tags=[tag],
                idempotency_key=f"{flow_run.id} {run.name}",
            )
            lines.append(f"- [{markdown_text(run.name)}](/v2/runs/flow-run/{started.id})")
    if served_page_url(RunFolder(folder)):
        lines += [f"\n[Their results in the list of runs]({run_list_url(f'{folder.name}-')}), once they have begun"]
    lines += [
        f"\n[Their flow runs](/v2/runs?{urlencode({'tags': tag})}). To stop the sweep, tick them and delete them there"
    ]
    title = f"{len(runs)} runs of the sweep {form.options.name}"
    post_markdown("\n".join(lines), artifact_key("sweep", form.options.name), title)
    return [run.name for run in runs]
