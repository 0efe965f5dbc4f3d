"""Error messages for wrong options and commands, with a suggestion of what to type instead.

The tables below map names of other programs, values with units, and common habits to the options and commands here.
"""

import difflib
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from haed.options import SYSTEMS
from pipeline.config.schema import (
    KINDS,
    PHASES,
    InvalidOptionsError,
    models_with_option,
    option_names,
    schema_options,
    type_of,
    validate_options,
)
from pipeline.console import cut_middle

PRESETS = Path(__file__).parents[1] / "presets"  # a link to configs/; a wheel contains copies
_OF_TOKENS = ("model.token.", "model.hourglass.")
_SHOWN = 60  # characters of a value
_NEAR = 0.8  # similarity of a misspelled value: a letter in five may be wrong


def _invert_table(table: dict[str, str]) -> dict[str, str]:
    return {name: meant for meant, names in table.items() for name in names.split()}


def _split_names(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for names, value in table.items() for name in names.split()}


# Names of options in other programs. `…` stands for each phase, or for the phase that was typed before the name.
_OPTIONS = {
    "optimizer.learning_rate": "lr learning_rate max_lr base_lr peak_lr max_learning_rate adam_lr",
    "….rate_to": "min_lr min_learning_rate final_lr lr_end end_lr lr_min",
    "batch.sequences": "batch_size bs bsz batchsize per_device_train_batch_size train_batch_size micro_batch_size "
    "device_batch_size global_batch_size minibatch num_sequences",
    "batch.pieces": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps accumulate_grad_batches "
    "microbatches accumulation",
    "batch.context": "context_length context_size seq_len seq_length sequence_length block_size max_length max_seq_len "
    "max_seq_length max_position_embeddings n_ctx ctx_len ctx bptt window_size",
    "evaluate.sequences": "eval_batch_size per_device_eval_batch_size test_batch_size",
    "….epochs": "num_epochs num_train_epochs max_epochs n_epochs train_epochs epoch",
    "….steps": "max_steps num_steps total_steps train_steps iterations max_iters max_iter iters num_iters num_train_steps "
    "n_steps updates max_updates step training_steps",
    "….seconds": "max_time time time_limit duration budget minutes hours max_seconds timeout max_train_time second",
    "….patience": "early_stopping early_stopping_patience early_stop",
    "….layer_decay": "layer_wise_lr_decay llrd layerwise_decay",
    "loader.workers shard.workers": "num_workers n_workers dataloader_num_workers data_workers",
    "shard.workers": "num_proc nproc n_jobs jobs processes_of_shards preprocessing_num_workers",
    "shard.megabytes": "shard_size max_shard_size shard_mb",
    "threads": "num_threads n_threads cpu_threads omp_num_threads cores cpus num_cpus torch_threads",
    "model.main.width model.token.width": "hidden_size hidden_dim d_model n_embd embed_dim emb_dim model_dim dim n_embed "
    "embedding_size d_hidden",
    "model.main.layers": "n_layers num_layers n_layer depth num_hidden_layers nlayers num_blocks",
    "model.main.heads model.token.heads": "num_heads n_heads n_head nhead num_attention_heads attention_heads nheads",
    "model.main.head_width model.token.head_width": "head_dim d_head head_size d_kv",
    "model.main.ffn model.token.ffn": "ffn_dim intermediate_size mlp_dim d_ff ffn_size feedforward_dim ff_dim d_inner n_inner "
    "mlp_ratio ff_mult dim_feedforward",
    "model.main.dropout model.token.dropout": "dropout dropout_rate p_dropout resid_pdrop attention_dropout attn_dropout drop",
    "model.main.positions model.token.positions": "position_embedding pos_emb positional_encoding rope position_embedding_type",
    "model.kind": "model_type arch architecture model_name model_arch network family",
    "model.encoder.kind": "encoder_type encoder_kind",
    "model.decoder.kind": "decoder_type decoder_kind",
    "model.hourglass.hierarchy": "shorten_factor shorten_factors",
    "chunker.k": "chunk_size chunk_length chunk_len max_chunk max_chunk_length patch_size patch_len max_word_length",
    "chunker.kind": "tokenizer_type tokenization chunking chunker_type segmentation",
    "optimizer.weight_decay": "wd weight_decay l2 l2_reg decay",
    "optimizer.warmup_steps": "warmup warmup_ratio warm_up warmup_iters lr_warmup num_warmup_steps "
    "warmup_updates lr_warmup_steps",
    "optimizer.clip_norm": "grad_clip clip clip_grad max_grad_norm gradient_clip_val gradient_clip clip_grad_norm grad_norm_clip "
    "gradient_clipping grad_clip_norm",
    "optimizer.schedule": "lr_scheduler scheduler lr_schedule lr_scheduler_type lr_decay_style lr_policy",
    "optimizer.beta2": "adam_beta2 betas b2 adam_betas",
    "optimizer.epsilon": "eps adam_epsilon adam_eps epsilon",
    "optimizer.ema": "ema_decay use_ema ema moving_average swa polyak",
    "iem.temperature": "tau softmax_temperature",
    "iem.extra_batches": "num_negatives negatives n_negatives negative_samples num_sampled",
    "seed": "random_seed manual_seed rng rng_seed random_state",
    "precision": "fp16 bf16 fp32 amp dtype mixed_precision float16 bfloat16 half use_amp torch_dtype tf32",
    "device": "gpu cuda accelerator use_gpu use_cuda no_cuda gpu_id device_id device_ids gpu_ids cpu",
    "launcher.processes": "gpus num_gpus n_gpus ngpu world_size nproc_per_node num_processes devices ddp distributed num_devices",
    "launcher.dask": "dask dask_address dask_scheduler scheduler_address",
    "compile": "torch_compile use_compile",
    "checkpoint.every_steps checkpoint.every_seconds": "save_every save_steps save_interval checkpoint_every ckpt_every "
    "save_freq checkpoint_interval save_strategy checkpoint_freq every_n_train_steps",
    "checkpoint.keep": "save_total_limit keep_last keep_checkpoints max_checkpoints save_top_k keep_last_n max_to_keep",
    "validation.times": "eval_every eval_steps eval_interval val_check_interval eval_freq validate_every val_interval val_every "
    "evaluation_strategy eval_strategy validation_interval check_val_every_n_epoch",
    "validation.windows": "eval_iters eval_batches limit_val_batches val_batches val_steps max_eval_samples",
    "log_steps": "log_every logging_steps log_interval log_freq log_every_n_steps print_every log_every_steps",
    "runs_dir": "output_dir out_dir save_dir checkpoint_dir results_dir output outdir savedir default_root_dir save_path out "
    "run_dir ckpt_dir logging_dir log_dir logdir model_dir",
    "shards_dir": "data_cache cache processed_dir tokenized_dir shard_dir corpus_dir",
    "loader.cache_dir": "cache_path cache_folder",
    "loader.cache_gigabytes": "cache_size cache_limit",
    "name": "run_name experiment_name exp_name run_id exp experiment run project job_name wandb_run_name title",
    "source.path": "data data_path dataset_path data_dir train_file train_data input file path corpus input_file files folder "
    "dataset_dir text_file train_path data_file data_files url",
    "source.path source.kind": "dataset dataset_name data_name",
    "source.kind": "data_type dataset_type source_type format input_format file_type",
    "source.field": "text_column column text_field field content_column text_key",
    "source.pattern": "glob include",
    "source.valid_percent": "valid_split val_split validation_split val_ratio test_size val_fraction valid_fraction "
    "validation_fraction val_percent split_ratio",
    "source.valid_pattern": "val_file valid_file validation_file val_data valid_path",
    "source.test_pattern": "test_file test_data test_path",
    "source.image_size": "img_size resolution image_resolution",
    "source.revision": "revision branch commit",
    "resume": "resume_from_checkpoint resume_from ckpt_path load_checkpoint restore continue overwrite force checkpoint_path",
    "finetune.start_from": "init_from pretrained pretrained_model load_from from_pretrained base_model pretrained_path "
    "model_name_or_path init_checkpoint warm_start start_from",
    "evaluate.split": "eval_split test_split eval_on",
    "evaluate.stride": "stride",
    "evaluate.stage": "stage phase",
    "evaluate.baselines": "baseline",
    "sample.temperature": "temp t sampling_temperature",
    "sample.top_k": "topk k",
    "sample.top_p": "topp nucleus p",
    "sample.chunks": "max_new_tokens max_tokens n_tokens num_tokens gen_length generate_length sample_length tokens "
    "sample_len max_gen_len new_tokens",
    "sample.prompts": "prompts start_text",
    "index.kind": "index_type faiss_index",
    "index.metric": "distance metric similarity_metric",
}
# Names that correspond to no option, and the alternative.
_ELSEWHERE = {
    "wandb use_wandb wandb_project wandb_log report_to tensorboard logger mlflow tb comet entity": (
        "`haed serve` starts TensorBoard, which shows all runs. `tracking=mlflow` or `tracking=wandb` adds a tracker"
    ),
    "vocab_size vocab tokenizer tokenizer_path tokenizer_name bpe vocab_file sentencepiece": (
        "tokens are bytes, so there is no vocabulary. Set how bytes form chunks with `chunker.kind=words` and `chunker.k=12`"
    ),
    "beta1 adam_beta1 momentum": "it is fixed. Of Adam's two only `optimizer.beta2=0.95` can be set",
    "optim optimizer_name optimizer_type optimiser adamw adam sgd use_adamw": (
        "the optimizer is AdamW. Set it with `optimizer.learning_rate=0.002` and other options of that section"
    ),
    "prompt text start question input_text": (
        'a prompt is an argument: `haed sample RUN --prompt "def "`, `haed next RUN "def "`'
    ),
    "num_samples n_samples samples num_return_sequences": "it is an argument: `haed sample RUN --samples 4`",
    "count top_n n": "it is an argument: `haed neighbours RUN QUERY --count 4`, `haed next RUN --count 4`",
    "config config_file config_name config_path preset cfg": "a preset or file is an argument: `--config quickstart`",
    "verbose v debug quiet q log_level loglevel": "there are no log levels. `--debug` prints tracebacks",
    "json": "it is an argument: `--json`",
    "gradient_checkpointing activation_checkpointing": "there is none. `batch.pieces=4` saves memory with the same step",
    "shuffle": "the data is always shuffled. `seed=0` sets its order",
    "deepspeed fsdp zero zero_stage": "`launcher.shard=true` shards the weights over `launcher.processes=2`",
    "model_parallel tensor_parallel": "only data parallelism is available: `launcher.processes=2`",
    "port host": "it is an argument: `haed serve --port 4300`, `haed explore RUN --port 4300`",
    "lr_decay_iters lr_decay_steps lr_decay": (
        "a schedule ends with its phase. `train.rate_to=0.05` is the final share of the learning rate"
    ),
}
# Other programs' values of an option, by the option's last part or full key.
_VALUES = {
    option: _invert_table(table)
    for option, table in {
        "device": {
            "cuda": "gpu nvidia cuda:all all rocm amd true",
            "auto": "tpu any default",
            "cpu": "mps metal intel false",
        },
        "precision": {
            "bf16": "fp16 float16 half 16 mixed 16-mixed amp bfloat16 bf16-mixed",
            "fp32": "float32 float 32 full single 32-true tf32 fp64 64 none false",
            "auto": "true",
        },
        "resume": {"required": "true yes on 1 must always", "never": "false no off 0 none null", "auto": "allow"},
        "split": {"valid": "val validation dev eval", "train": "training", "test": "testing"},
        "stage": {"pretrain": "pretraining phase1 1", "finetune": "phase2 2 finetuning fine-tune", "train": "training"},
        "schedule": {
            "stable": "constant wsd trapezoidal",
            "inverse_root": "rsqrt inverse_sqrt noam",
            "cosine": "cosine_annealing cosine_with_warmup",
        },
        "source.kind": {
            "text": "txt file files folder",
            "jsonl": "json jsonlines ndjson",
            "images": "image picture pictures png",
            "audio": "wav sound",
            "datasets": "hf huggingface hub dataset csv tsv parquet arrow",
            "webdataset": "wds tar",
            "stdlib": "python",
            "stdin": "-",
            "wikitext": "wikitext2",
        },
        "chunker.kind": {
            "words": "word bpe",
            "sentences": "sentence",
            "pixels": "pixel",
            "fixed": "bytes byte characters chars patch patches",
        },
        "model.kind": {
            "haed": "hierarchical",
            "hourglass": "transformer gpt",
            "top_down": "topdown",
            "bottom_up": "bottomup",
            "spacebyte": "space_byte",
        },
        "metric": {"ip": "dot inner inner_product", "l2": "euclidean", "cosine": "cos", "centred": "centered"},
        "space": {"chunks": "embeddings words chunk", "contexts": "states context"},
        "map": {"tsne": "t-sne"},
        "threads": {"null": "auto max default"},
    }.items()
}
_COMMANDS = {
    "evaluate": "eval test validate score val perplexity ppl measure benchmark-model evaluation",
    "sample": "predict infer inference generate gen complete completion write continue-text chat",
    "run": "fit start go all pipeline everything do launch main demo quickstart",
    "shard": "tokenize prepare preprocess data process build dataset ingest encode split sharding",
    "neighbours": "neighbors neighbor neighbour embed search knn nn query similar nearest lookup ask",
    "index": "faiss indexing vectors embeddings",
    "finetune": "fine-tune fine_tune sft tune phase2 phase-two ft finetuning",
    "pretrain": "pre-train pre_train phase1 phase-one pt pretraining",
    "train": "training learn resume",
    "profile": "bench benchmark speed time perf flops",
    "report": "plot graph html show-run summary results summarize summarise info show describe",
    "compare": "diff comparison versus vs table",
    "analyse": "analyze analysis analyses probe inspect map tsne umap",
    "explore": "browse view open page",
    "serve": "ui server web dashboard board tensorboard gui prefect app webui",
    "deploy": "deployment worker register",
    "experiment": "experiments paper papers reproduce figure tables exp",
    "config": "configs presets preset options params settings defaults print-config",
    "cat": "decode export dump restore bytes original",
    "next": "predict-next topk likely logits nexttoken",
}
# Names of commands that do not exist here, and the alternative.
_NO_COMMANDS = {
    "list ls runs list-runs status ps": (
        "runs are folders in runs/. `haed serve` shows them in a browser, `haed compare RUN RUN` compares them"
    ),
    "logs log metrics tail": "metrics are in runs/NAME, with a folder for each phase. `haed serve` shows them in a browser",
    "help": "`haed --help` lists the commands, `haed train --help` describes one",
    "version": "`pip show haed` prints the version",
    "init new create setup install": "no setup is needed. `haed run --config quickstart name=mine` makes a run",
    "rm delete remove clean del": "a run is a folder. Delete runs/NAME",
    "stop kill cancel": "Ctrl-C stops a training and saves it. The same command resumes it",
    "download get fetch": "give the path of the data: `haed run --config quickstart source.path=my-texts`",
}


def list_presets() -> list[str]:
    """Return the names of the shipped presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


_OPTION_OF, _COMMAND_OF = _invert_table(_OPTIONS), _invert_table(_COMMANDS)
_COMMAND_ADVICE = _split_names(_NO_COMMANDS)
_ADVICE = _split_names(_ELSEWHERE) | _COMMAND_ADVICE


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean NAME? " for the closest of the known names, or an empty text if none is close."""
    spelled = {each.replace("-", "_"): each for each in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), spelled, 1)
    return f"Did you mean {spelled[close[0]]}? " if close else ""


def _join_foreign_name(name: str) -> str:
    """Return `batch.size` as `batch_size` if that is another program's name of an option."""
    joined, last = name.replace(".", "_"), name.rpartition(".")[2]
    ours = any(key.rpartition(".")[2] == last for key in option_names())
    return joined if joined in _OPTION_OF and not ours else name


def find_similar_keys(name: str) -> list[str]:
    """Return the full keys of options that a name may stand for.

    The name may be that of another program, the last part of a key, or a misspelling.

    Args:
        name: as typed, with or without sections before it.
    """
    name = name.strip("-").replace("-", "_").lower()
    if name in option_names():
        return [name]
    name = _join_foreign_name(name)
    above, _, last = name.rpartition(".")
    if above and type_of(above) is None:
        if inner := [key for key in option_names() if key.endswith(f".{name}")]:
            return inner  # decoder.kind
        if close := difflib.get_close_matches(name, option_names(), 1, 0.85):
            return close
    ends = {key: key.rpartition(".")[2] for key in option_names()}
    ending = [key for key, end in ends.items() if end == last]
    if last in _OPTION_OF:
        phases = [above] if above in PHASES else PHASES
        keys = [key.replace("…", phase) for key in _OPTION_OF[last].split() for phase in phases]
        return list(dict.fromkeys([*keys, *(key for key in ending if not above and len(ending) < 4)]))
    inside = [key for key in option_names() if above and key.startswith(f"{above}.")]
    if close := difflib.get_close_matches(last, [ends[key] for key in inside], 1, 0.7):
        similar = [key for key in inside if ends[key] == close[0]]
        return [key for key in similar if key.count(".") == above.count(".") + 1] or similar
    if ending:
        return ending
    if close := difflib.get_close_matches(name, option_names(), 1, 0.8):
        return close
    if "_" in last and (whole := [key for key in option_names() if key.replace(".", "_").endswith(f"_{last}")]):
        return whole  # main_layers, model_main_layers
    if whole := [key for key in option_names() if key.replace(".", "_") == name.replace(".", "_")]:
        return whole
    close = difflib.get_close_matches(last, dict.fromkeys([*ends.values(), *_OPTION_OF]), 1, 0.8)
    return [] if not close else [key for key, end in ends.items() if end == close[0]] or find_similar_keys(close[0])


def suggest_option(name: str, value: Any = None) -> str:
    """Return a suggestion for a name that is no option, such as `use batch.sequences=8`.

    Empty: nothing is similar.
    """
    last = _join_foreign_name(name.strip("-").replace("-", "_").lower()).rpartition(".")[2]
    if last in _ADVICE and last not in _OPTION_OF:
        return _ADVICE[last]
    if not (keys := find_similar_keys(name)[:4]):
        return ""
    if len(keys) > 1:
        return f"did you mean {' or '.join(f'{key}=' for key in keys)}?"
    (key,) = keys
    if last in ("minutes", "hours") and isinstance(value, str):
        value = f"{value} {last}"
    # Another program's name may already determine the value: fp16=true, gpu=0.
    is_value = key == "device" or key == "precision" and last not in ("dtype", "torch_dtype", "mixed_precision")
    fits = isinstance(value, str) and value and not is_value and _accepts_value(key, value)
    if last in _OPTION_OF:
        condition = " with a model of tokens, such as model.kind=hourglass" if key.startswith(_OF_TOKENS) else ""
        return f"use {key}={value if fits else _example_value(key, last, value)}{condition}"
    return f"did you mean {key}={value if fits else ''}?"


def _example_value(key: str, name: str, value: Any) -> str:
    """Return an example value of an option: the intended one if it can be guessed, else the default."""
    if key == "precision":
        off = isinstance(value, str) and value.lower() in ("false", "no", "off", "0")
        return "fp32" if off else _VALUES["precision"].get(name, name if name in ("bf16", "fp32") else "bf16")
    if key == "device":
        off = name == "no_cuda" or isinstance(value, str) and value.lower() in ("false", "no", "off")
        if name == "cpu" or off:
            return "cpu"
        if isinstance(value, str) and (value in ("auto", "cpu") or value.startswith("cuda")):
            return value
        return f"cuda:{value}" if isinstance(value, str) and value.isdecimal() and value != "1" else "cuda"
    if key == "resume":
        return "required"
    if isinstance(value, str) and (meant := _guess_value(key, type_of(key), value)):
        return meant
    usual = schema_options()[key].default
    examples = {"source.path": "my-texts", "finetune.start_from": "RUN"}
    return str(examples.get(key, 100 if usual is None else usual)).lower()


def explain_malformed_override(word: str) -> str:
    """Return the error message for a word that should change an option but is not of the form key=value."""
    if word.startswith(("–", "—")):
        return f"{word!r} begins with a long dash. Use --{word.lstrip('–—')}"
    message = f"{word!r} is not of the form key=value"
    if word in option_names():
        return f"{message}. Give a value after {word}="
    key, equals, value = word.replace("/", ".").partition("=")
    if equals and key in option_names():
        return f"{message}. Use {key}={word.partition('=')[2]}"
    key, colon, value = word.partition(":")
    if colon and is_dataclass(type_of(key)):
        return explain_section_value(key, value.strip() or "…")
    return f"{message}. Use {key}={value.strip() or '…'}" if colon and key in option_names() else message


def explain_unknown_command(word: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown command, with the one that was probably meant."""
    name, known = word.strip("-").lower().replace("_", "-"), list(known)
    if name in _COMMAND_ADVICE:
        return f"there is no command {word}: {_COMMAND_ADVICE[name]}"
    if name in list_presets():
        return f"there is no command {word}. It is a preset: haed run --config {name}"
    if name == "haed":
        return "haed is written twice. Write it once"
    meant = _COMMAND_OF.get(name) or _COMMAND_OF.get(name.replace("-", "_"))
    close = [meant] if meant in known else difflib.get_close_matches(name, known, 1, 0.6)
    if not close and "=" in word:
        return f"{word} is an option, and the command comes first. Use haed train --config quickstart {word}"
    return f"there is no command {word}. {f'Did you mean haed {close[0]}? ' if close else ''}haed --help lists the commands"


def explain_inapplicable_option(key: str, kind: str) -> str:
    """Return one line on an option that a model of this kind does not use: which kinds do, and what to set instead."""
    owners = [f"model.kind={other}" for other in models_with_option(key)]
    instead = [schema_options()[key].instead]
    if key.startswith("model."):
        instead = [f"model.{section}.…" for section in SYSTEMS[kind].sections]
    hint = f"set {' or '.join(instead)}" if any(instead) else "leave it out"
    mismatch = f"{key} belongs to {', '.join(owners)}, and this is model.kind={kind}"
    return f"{mismatch}: {hint}, or set {owners[0]} for a new run"


def explain_unknown_option(key: str, value: Any) -> str:
    """Return the error message for a key that is no option, with the option that was probably meant."""
    hint = suggest_option(key, value)
    sign = "; " if hint.startswith("did") else ": " if hint else ""
    return f"there is no option {shorten_text(key)}{sign}{hint}"


def explain_section_value(key: str, value: Any) -> str:
    """Return the error message for a section that was given a value."""
    if value is None:
        return f"{key}=null: {key} is a section of options. Leave it out, or set one option of it"
    message = f"{key}={shorten_text(value)}: {key} is a section of options. Set one option of it"
    choice = f"{key}.kind"
    if (known := type_of(choice)) is not None and isinstance(value, str):
        names = SYSTEMS if choice == "model.kind" else KINDS.get(choice, get_args(known))
        if value in names or value in _VALUES.get(choice, {}):
            return f"{message}: {choice}={_VALUES.get(choice, {}).get(value, value)}"
        if key == "source":
            return f"{message}: {key}.path={value}"
        if key == "model" and value in list_presets():
            return f"{message}, or use the preset: `--config {value}`"
    if key == "optimizer":
        return f"{message}, such as optimizer.learning_rate=0.002 (the optimizer is always AdamW)"
    first = next((each for each in option_names() if each.startswith(f"{key}.") and each != choice), f"{key}.…")
    limits = f"{key}.steps=100" if key in PHASES else f"{first}={str(schema_options()[first].default).lower()}"
    return f"{message}, such as {limits}"


def _accepts_value(key: str, value: str) -> bool:
    kinds = schema_options()[key].kinds
    try:
        validate_options({key: value} | ({f"{key.rpartition('.')[0]}.kind": kinds[0]} if kinds else {}))
    except InvalidOptionsError:
        return False
    return True


_PARSING = {"int": "is not a whole number", "float": "is not a number", "bool": "expected true or false"}
_PLAIN = {"finite_number": "must be a finite number", "int_parsing_size": "has too many digits"}


def explain_validation_error(key: str, item: Any) -> str:
    """Return a validation error of Pydantic as a sentence, with the accepted value that was probably meant.

    Args:
        key: the option.
        item: an entry of the error's list.
    """
    value, code, kind, inner = item["input"], item["type"], type_of(key), item["loc"][-1]
    if optional := NoneType in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if code == "unexpected_keyword_argument":
        section, kinds = key.rpartition(".")[0], ", ".join(schema_options()[key].kinds)
        return f"{key} belongs to {section}.kind={kinds}. Leave it out, or set that kind"
    if value is None:
        return f"{key}[{inner}] must not be null" if isinstance(inner, int) else f"{key}=null: expected a value"
    if code == "list_type":
        return _explain_list(key, get_args(kind)[0], value)
    if isinstance(inner, int):
        key, kind = f"{key}[{inner}]", get_args(kind)[0]
    if isinstance(value, list | dict) and code != "value_error" and get_origin(kind) is not list:
        return f"{key}={shorten_value(value)}: expected one value, without brackets"
    meant = None
    if code == "value_error":
        message = item["msg"].removeprefix("Value error, ")
        names = re.findall(r"[\w.-]+", message.partition("expected one of ")[2])
        if not isinstance(value, list):
            meant = _VALUES.get(key, {}).get(str(value).lower())
            close = [meant] if meant in names else difflib.get_close_matches(str(value).lower(), names, 1, _NEAR)
            meant = close[0] if close else None
        if key == "model.kind" and value in list_presets():
            message += f"; {value} is a preset: `--config {value}`"
        elif key in KINDS and meant is None:
            group = KINDS[key].group
            message += f". For a kind of your own, install the package that names it as an entry point of {group}"
    elif code == "string_pattern_mismatch" and key == "device":
        message = "expected auto (a GPU if there is one), cpu, cuda, or cuda:1 for the second GPU"
        numbered = re.fullmatch(r"(?:gpu:?)?(\d{1,3})", value.lower())
        meant = f"cuda:{numbered[1]}" if numbered else None
        meant = meant or _VALUES["device"].get(value.lower())
    elif code == "literal_error":
        message = f"expected one of {', '.join(map(str, get_args(kind)))}"
        meant = _guess_value(key, kind, str(value))
    elif code in _PLAIN:
        message = _PLAIN[code]
    elif (name := code.partition("_")[0]) in _PARSING:
        message = _PARSING[name]
        meant = _guess_value(key, kind, str(value), optional)
    else:
        message = item["msg"].lower()
    is_choice = message.startswith("expected one of")
    shown = shorten_value(value) if kind is str and not is_choice else shorten_text(value)
    return f"{key}={shown}: {message}" + (f". Write {key}={meant}" if meant is not None else "")


def _explain_list(key: str, kind: Any, value: Any) -> str:
    items = "1, 2" if kind is int else "a, b"
    message = f"{key}={shorten_text(value)}: expected a list, such as [{items}]"
    if not isinstance(value, str) or not value or "[" in value:
        return message
    items = f"[{value}]" if kind is int else json.dumps([value], ensure_ascii=False)
    return f"{message}. Write {shlex.quote(f'{key}={items}')}"


_NO_LIMIT = ("none", "inf", "infinite", "infinity", "unlimited", "never", "no", "off", "all", "-1", "nan")
_SCALES = _split_names({"k thousand": 1e3, "m mio million": 1e6, "g b bn billion": 1e9})
_TIMES = _split_names(
    {
        "s sec secs second seconds": 1,
        "m min mins minute minutes": 60,
        "h hr hrs hour hours": 3600,
        "d day days": 86400,
        "w week weeks": 604800,
    }
)
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NUMBER = r"[+-]?(?:\d[\d_]*)?\.?\d+(?:[eE][+-]?\d+)?"


def _guess_value(key: str, kind: Any, text: str, optional: bool = False) -> str | None:
    """Return the accepted value that a text probably stands for; None: it cannot be guessed."""
    text = text.strip().strip("'\"“”‘’`=;,").strip()
    last = key.rpartition(".")[2]
    table = _VALUES.get(key) or _VALUES.get(last) or {}
    if text.lower() in table:
        return table[text.lower()]
    if get_origin(kind) is Literal:
        names = [str(each) for each in get_args(kind)]
        close = [each for each in names if each.lower() == text.lower().replace("-", "_")]
        close = close or difflib.get_close_matches(text.lower(), names, 1, _NEAR)
        return close[0] if close else None
    if kind is bool:
        words = _split_names({"enable enabled": "true", "disable disabled none null": "false"})
        return words.get(text.lower())
    if kind not in (int, float, int | None, float | None):
        return None
    if optional and text.lower() in _NO_LIMIT:
        return "null"
    try:
        number = _parse_number(last, text)
    except (ValueError, OverflowError):  # 1__0, or more digits than Python reads
        return None
    if number is None or abs(number) > 2**63:
        return None
    if last.endswith("percent") and 0 < number < 1:
        number = round(100 * number, 9)
    if number == int(number):
        return str(int(number))
    return None if kind in (int, int | None) else f"{number:.10g}"


def _parse_number(name: str, text: str) -> float | None:
    """Parse a number with a unit, a factor, digit separators, or in another base; None: it is not a number."""
    text = text.lower().replace(" ", "").replace("\u00a0", "")
    if name.endswith("seconds"):
        if re.fullmatch(r"\d+(:\d\d){1,2}", text):
            return sum(int(part) * 60**power for power, part in enumerate(reversed(text.split(":"))))
        pairs = re.findall(rf"({_NUMBER})([a-z]+)", text)
        if pairs and "".join(map("".join, pairs)) == text and all(unit in _TIMES for _, unit in pairs):
            return sum(float(number) * _TIMES[unit] for number, unit in pairs)
    if match := re.fullmatch(rf"({_NUMBER})(%|percent)", text):
        return float(match[1]) if name.endswith("percent") else float(match[1]) / 100
    if match := re.fullmatch(rf"({_NUMBER})([kmgt]i?b)", text):
        factor = {"megabytes": 1e6, "gigabytes": 1e9}.get(name.rpartition("_")[2], 1.0)
        return float(match[1]) * _BYTES[match[2]] / factor
    if match := re.fullmatch(rf"({_NUMBER})([a-z]+)", text):
        return float(match[1]) * _SCALES[match[2]] if match[2] in _SCALES else None
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}([,'’]\d{3})+", text):
        return float(re.sub(r"[,'’]", "", text))
    if re.fullmatch(r"[+-]?\d+,\d+", text):
        return float(text.replace(",", "."))
    if re.fullmatch(r"0x[0-9a-f]+|0b[01]+|0o[0-7]+", text):
        return float(int(text, 0))
    if match := re.fullmatch(r"(\d{1,6})(\*\*|\^|\*|/)(\d{1,6})", text):
        one, sign, other = int(match[1]), match[2], int(match[3])
        if sign == "/":
            return one / other if other else None
        return float(one * other if sign == "*" else one**other) if sign == "*" or other < 64 and one < 1000 else None
    if re.fullmatch(_NUMBER + r"\.?", text) and len(text) < 40:
        return float(text.rstrip("."))
    return None


def shorten_value(value: Any) -> str:
    """Return the `repr` of a value, without its middle if it is long."""
    return cut_middle(repr(value), _SHOWN)


def shorten_text(value: Any) -> str:
    """Return a value as typed, without its middle if it is long."""
    return cut_middle(value if isinstance(value, str) else repr(value), _SHOWN)
