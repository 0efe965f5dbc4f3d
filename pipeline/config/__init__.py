"""Options of a run: their schema, and loading, checking and writing them."""

# ruff: noqa: F401 (what other packages import from here)

from pipeline.config.loading import (
    ConfigError,
    Difference,
    check_name,
    check_options,
    check_output_folder,
    check_phase,
    check_training,
    describe_presets,
    diff_trees,
    dump_options,
    flatten_tree,
    load_options,
    write_override,
)
from pipeline.config.messages import list_presets
from pipeline.config.schema import (
    PHASES,
    AnalyseOptions,
    BatchOptions,
    CheckpointOptions,
    EvaluateOptions,
    FinetuneOptions,
    IndexOptions,
    LauncherOptions,
    OptimizerOptions,
    Options,
    Phase,
    PhaseOptions,
    PretrainOptions,
    SampleOptions,
    TrainOptions,
    ValidationOptions,
    applies_to,
    get_option,
    is_mixed,
    is_option,
    max_known_chunks,
    phases_to_train,
    remembered_chunks,
    requested_likelihood,
    set_option,
    training_phases,
    type_of,
)
