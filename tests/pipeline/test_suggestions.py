"""Commands of messages, as Prefect's UI and the pages show them."""

import shlex

import pytest

from pipeline.suggestions import Suggestion, format_command, mark_commands, name_flows


def form_url(suggestion: Suggestion) -> str:
    return f"{suggestion.run}/{suggestion.flow}?{suggestion.fields}"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Run `haed evaluate` again to compare.", "Run the flow evaluate again to compare."),
        (f"Run {format_command('pretrain', 'runs/mine')} first", "Run the flow pretrain (run mine) first"),
        (f"Run {format_command('index', '/a b/c d')}", "Run the flow index (run c d)"),
        (format_command("index", "runs/seed=1", "index.kind=flat"), "the flow index (run seed=1 index.kind=flat)"),
        ("Make one with `haed run --config quickstart`", "Make one with the flow haed (preset=quickstart)"),
        (
            "Use `haed index RUN --space contexts` and `haed neighbours RUN --context TEXT`",
            "Use the flow index (space=contexts) and the flow neighbours",
        ),
        ("`haed sample RUN --prompt 'def x' sample.chunks=9`", "the flow sample (prompts=def x sample.chunks=9)"),
        ("saved. Run the same command to resume", "saved. Retry to resume"),
        ("Lower `--samples` or sample.chunks (`--min-count 1`)", "Lower samples or sample.chunks (min_count=1)"),
        ("`haed serve` starts TensorBoard -- and more", "`haed serve` starts TensorBoard -- and more"),
        ("a= is wrong. `haed evaluate` takes b", "a= is wrong. The flow evaluate takes b"),
        ("`haed`, `haed next 'x` and `jq -c .`", "`haed`, `haed next 'x` and `jq -c .`"),
    ],
)
def test_prefect_names_flows_and_fields_in_place_of_commands(message: str, shown: str) -> None:
    assert name_flows(message) == shown == name_flows(shown)


def test_a_command_can_be_typed_as_it_is() -> None:
    command = format_command("index", "/a b/it's", "--space", "contexts")
    assert shlex.split(command.strip("`")) == ["haed", "index", "/a b/it's", "--space", "contexts"]


def test_pages_have_code_and_beside_prefect_links_to_forms() -> None:
    message = f"<b> {format_command('index', 'runs/a', 'index.kind=flat')}, `haed shard`, `--count 2`, `jq`. Run the same command"
    alone = (
        "&lt;b&gt; <code>haed index runs/a index.kind=flat</code>, <code>haed shard</code>, count=2, <code>jq</code>. "
    )
    assert mark_commands(message) == f"{alone}Run the same command"
    link = '<a href="a/index?{&#39;overrides&#39;: [&#39;index.kind=flat&#39;]}">the form index</a>'
    beside = f"&lt;b&gt; {link}, the flow shard, count=2, <code>jq</code>. Retry"
    assert mark_commands(message, form_url) == beside
