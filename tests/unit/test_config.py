"""The argument set: generation, strictness, provenance, cross-section rules, generated documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_vla.config.check import check
from megatron_vla.config.cli import StrictParser, add_section, field_help, flag_name, to_flags
from megatron_vla.config.docs import render
from megatron_vla.config.run import SECTIONS, RunConfig, from_dict, parse_args
from megatron_vla.models.registry import MODEL_FAMILIES, model_family

BASE = ["--mock-data", "--model-variant", "tiny", "--train-iters", "3", "--lr-warmup-iters", "1"]


def errors_of(*extra: str, world_size: int = 1) -> dict[str, str]:
    config = parse_args([*BASE, *extra])
    findings = check(config, model_family(config.model.model_name), world_size)
    return {f.where: f"{f.what} {f.fix}" for f in findings if f.severity == "error"}


def all_sections() -> list[type]:
    return [*SECTIONS.values(), *(model_family(name).config_type for name in MODEL_FAMILIES)]


@pytest.mark.parametrize("section", all_sections(), ids=lambda s: s.__name__)
def test_every_field_has_help_and_is_frozen(section: type) -> None:
    assert section.__dataclass_params__.frozen  # type: ignore[attr-defined]
    missing = {f.name for f in dataclasses.fields(section)} - set(field_help(section))
    assert not missing, f"no help string under {missing}"


def test_no_flag_is_declared_twice() -> None:
    for name in MODEL_FAMILIES:
        fields = [f.name for s in (*SECTIONS.values(), model_family(name).config_type) for f in dataclasses.fields(s)]
        assert len(fields) == len(set(fields))


def test_flags_round_trip_through_the_parser() -> None:
    words = [
        *BASE,
        "--camera-map",
        "base=a",
        "wrist=b",
        "--no-shuffle",
        "--lr",
        "0.25",
        "--ema-decay",
        "0.5",
        "--num-layers",
        "5",
    ]
    config = parse_args(words)
    assert config.data.camera_map == ("base=a", "wrist=b")
    assert config.data.shuffle is False and config.optimizer.lr == 0.25 and config.optimizer.ema_decay == 0.5
    rebuilt = parse_args([w for s in (*SECTIONS, "family") for w in to_flags(getattr(config, s))])
    assert dataclasses.replace(rebuilt, given=config.given) == config
    assert from_dict(config.to_dict()) == config


def test_a_checkpoint_may_name_a_retired_flag() -> None:
    config = parse_args(BASE)
    stored = config.to_dict()
    stored["optimization"]["expert_stream"] = True
    stored["given"].append("expert_stream")
    assert from_dict(stored) == config
    stored["optimization"]["no_such_flag"] = True
    with pytest.raises(TypeError, match="no_such_flag"):
        from_dict(stored)


def test_variant_gives_defaults_and_flags_win() -> None:
    tiny = parse_args(BASE)
    assert tiny.family.hidden_size == 64 and tiny.family.num_layers == 3
    assert parse_args([*BASE, "--num-layers", "2"]).family.num_layers == 2
    assert parse_args(["--mock-data"]).family.hidden_size == 2048
    assert "num_layers" not in tiny.given and "num_layers" in parse_args([*BASE, "--num-layers", "2"]).given


def test_config_is_immutable() -> None:
    config = parse_args(BASE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.seed = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--micro-batch", "2"], "--micro-batch-size"),
        (["--tensor-model-parallel", "2"], "--tensor-model-parallel-size"),
        (["--no-such-flag"], "unknown argument"),
        (["--model-variant", "huge"], "base, small, tiny"),
        (["--model-name", "pi1"], "known: pi05"),
        (["--normalization", "minmax"], "invalid choice"),
    ],
)
def test_unknown_abbreviated_or_bad_flags_are_refused(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args([*BASE, *words])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_type_that_no_flag_can_express_is_an_error() -> None:
    Bad = dataclasses.make_dataclass("Bad", [("table", dict, None)], frozen=True)
    with pytest.raises(TypeError, match=r"Bad\.table"):
        add_section(StrictParser(), Bad)


def test_a_healthy_command_line_has_no_errors() -> None:
    assert errors_of() == {}


@pytest.mark.parametrize(
    ("words", "where", "says"),
    [
        (["--global-batch-size", "7", "--micro-batch-size", "2"], "--global-batch-size", "use --global-batch-size 8"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size", "use --tensor-model-parallel-size 1 or more"),
        (["--sequence-parallel"], "--sequence-parallel", "add --tensor-model-parallel-size 2"),
        (["--context-parallel-size", "2"], "--context-parallel-size", "not supported"),
        (["--bf16", "--fp64"], "--bf16, --fp64", "choose one"),
        (["--mock-prompt-length", "999"], "--mock-prompt-length", "use --mock-prompt-length 64"),
        (["--data-path", "/"], "--mock-data, --data-path", "drop one"),
        (["--lr-warmup-iters", "3"], "--lr-warmup-iters", "use --lr-warmup-iters 0"),
        (["--min-lr", "1"], "--min-lr", "above --lr"),
        (["--train-iters", "0"], "--train-iters", "not positive"),
        (["--ema-decay", "1.5"], "--ema-decay", "outside"),
        (["--save-interval", "5"], "--save-interval", "add --save"),
        (["--load-iteration", "5"], "--load-iteration", "add --load"),
        (["--statistics-path", "/nowhere/statistics.json"], "--statistics-path", "does not exist"),
        (["--save", "/proc/version/x"], "--save", "is a file"),
        (["--model-action-representation", "delta"], "--delta-action-dims", "for example"),
        (["--delta-action-dims", "0"], "--delta-action-dims", "no effect"),
        (
            ["--use-distributed-optimizer", "--data-parallel-strategy", "torch_ddp"],
            "--use-distributed-optimizer",
            "use megatron_ddp",
        ),
        (["--overlap-param-gather"], "--overlap-param-gather", "add --use-distributed-optimizer --overlap-grad-reduce"),
        (["--ddp-bucket-size", "100"], "--ddp-bucket-size", "add --overlap-grad-reduce"),
        (
            ["--bf16", "--no-gradient-buffers", "--micro-batch-size", "2"],
            "--no-gradient-buffers",
            "--no-accumulate-allreduce-grads-in-fp32",
        ),
        (["--no-gradient-buffers", "--micro-batch-size", "1"], "--no-gradient-buffers", "one sample per micro-batch"),
        (
            ["--no-gradient-buffers", "--global-batch-size", "64", "--micro-batch-size", "2"],
            "--no-gradient-buffers",
            "several micro-batches",
        ),
        (["--data-parallel-sms", "4"], "--data-parallel-sms", "add --overlap-grad-reduce"),
        (["--overlap-grad-reduce", "--data-parallel-sms", "33"], "--data-parallel-sms", "not 1 ... 32"),
        (["--fsdp-replicate-size", "1"], "--fsdp-replicate-size", "drop it"),
        (["--data-parallel-strategy", "fsdp2", "--fsdp-replicate-size", "2"], "--fsdp-replicate-size", "does not divide"),
        (["--bf16", "--data-parallel-strategy", "torch_ddp"], "--data-parallel-strategy", "--no-accumulate-allreduce"),
        (["--lr", "nan"], "--lr", "not a finite number"),
        (["--distributed-timeout-minutes", "inf"], "--distributed-timeout-minutes", "not a finite number"),
        (["--norm-epsilon", "nan"], "--norm-epsilon", "not a finite number"),
        (["--adam-eps", "-1"], "--adam-eps", "not positive"),
        (["--seed", str(2**63)], "--seed", "63 bits"),
        (["--mock-num-samples", "0"], "--mock-num-samples", "1 or more"),
        (["--mock-num-cameras", "0"], "--mock-num-cameras", "1 or more"),
        (["--mock-prompt-length", "0"], "--mock-prompt-length", "1 or more"),
        (["--vocab-size", "19"], "--vocab-size", "use --vocab-size 20"),
        (["--tensorboard"], "--tensorboard", "--log-dir"),
        (["--log-dir", "/proc/version/x"], "--log-dir", "is a file"),
        (["--wandb-name", "x"], "--wandb-name", "add --wandb-project"),
    ],
)
def test_each_rule_names_its_flag_and_a_way_out(words: list[str], where: str, says: str) -> None:
    assert says in errors_of(*words)[where]


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (("vision_tower.layer.*",), "nearest names: vision_tower.layers.*"),
        (("layers.*", "layers.0.prefix"), "layers.0.prefix lies inside layers.0"),
    ],
)
def test_module_patterns_are_checked_before_any_process_group(patterns: tuple[str, ...], says: str) -> None:
    flag = "--activation-checkpoint-module-patterns"
    # Four ranks: the names are those of the whole model, whatever a stage will hold.
    assert says in errors_of(flag, *patterns, "--pipeline-model-parallel-size", "2", world_size=4)[flag]
    assert not errors_of(flag, "layers.*", "vision_tower.layers.*")


def test_wandb_without_credentials_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert "WANDB_MODE=offline" in errors_of("--wandb-project", "robots")["--wandb-project"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert errors_of("--wandb-project", "robots") == {}


def test_N10_delta_of_a_delta_dataset_is_refused() -> None:
    found = errors_of(
        "--dataset-action-representation", "delta", "--model-action-representation", "delta", "--delta-action-dims", "0"
    )
    assert "already deltas" in found["--model-action-representation"]


def test_all_problems_are_reported_at_once() -> None:
    found = errors_of("--bf16", "--fp64", "--global-batch-size", "7", "--micro-batch-size", "2", "--train-iters", "0")
    assert len(found) >= 3


def test_batch_sizes_follow_the_world_size() -> None:
    config: RunConfig = parse_args([*BASE, "--micro-batch-size", "2", "--global-batch-size", "16"])
    assert [config.num_microbatches(w) for w in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert parse_args([*BASE, "--micro-batch-size", "3"]).global_batch_size(4) == 12


def test_flag_documentation_is_fresh() -> None:
    committed = Path(__file__).parents[2] / "docs" / "flags.md"
    assert committed.read_text() == render() + "\n", "run `make docs`"


def test_flag_names_have_one_spelling() -> None:
    assert flag_name("fp8_min_dim") == "--fp8-min-dim"
