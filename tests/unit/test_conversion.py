"""Checkpoint conversion of Pi0.5: strict loading, both released layouts both ways, parts, the tool."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pi05_fixtures import golden_batch, golden_case, golden_model, our_name, replaced, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vla.config.run import parse_args
from megatron_vla.findings import CheckError
from megatron_vla.models.common.key_map import KeyMap, Rename
from megatron_vla.models.common.tensor_file import open_tensors
from megatron_vla.models.pi05.build import build, build_module
from megatron_vla.models.pi05.convert import CONVERTER, infer_sizes
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.key_map import EMBED_TOKENS, EXPERT_LM_HEAD, LM_HEAD, PI05_KEYS
from tools import convert_checkpoint

CASE = golden_case("tiny_b")
SIZES = ["--vision-num-attention-heads", "3"]


def quiet(line: str) -> None:
    del line


def released() -> dict[str, Tensor]:
    """The golden checkpoint as openpi writes it."""
    return CASE.tensors("weights")


def as_lerobot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as LeRobot saves them: outer prefix, both names of the token table."""
    return {f"model.{k}": v for k, v in {**tensors, EMBED_TOKENS: tensors[LM_HEAD].clone()}.items()}


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights_are_golden(model: torch.nn.Module) -> bool:
    parameters = dict(model.named_parameters())
    pairs = [(parameters[our_name(k)], v) for k, v in released().items() if k != EXPERT_LM_HEAD]
    assert len(pairs) == len(parameters)
    return all(torch.equal(p.detach(), v) for p, v in pairs)


# K01: strict ----------------------------------------------------------------------------------------------------------------


def without_one(tensors: dict[str, Tensor]) -> str:
    del tensors["time_mlp_in.weight"]
    return "time_mlp_in.weight"


def with_one_renamed(tensors: dict[str, Tensor]) -> str:
    name = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    tensors[name.replace("up_proj", "upp_proj")] = tensors.pop(name)
    return "layers.1.suffix.mlp.up_proj.weight"


def with_one_unknown(tensors: dict[str, Tensor]) -> str:
    tensors["state_proj.weight"] = torch.zeros(3)
    return "state_proj.weight"


@pytest.mark.parametrize("damage", [without_one, with_one_renamed, with_one_unknown])
def test_K01_a_damaged_checkpoint_is_refused_with_the_name(tmp_path: Path, damage: Callable[[dict[str, Tensor]], str]) -> None:
    tensors = released()
    name = damage(tensors)
    path = saved(tmp_path, tensors)
    model = build_module(CASE.config)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CheckError, match=name.replace(".", r"\.")):
        CONVERTER.load(path, model, report=quiet)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)), "nothing was loaded by halves"
    assert name in " ".join(map(str, CONVERTER.check_file(path, CASE.config)))


def test_K01_load_prints_how_many_and_how_exact(tmp_path: Path) -> None:
    path = saved(tmp_path, released())
    lines: list[str] = []
    model = build_module(CASE.config)
    count = len(list(model.parameters()))
    CONVERTER.load(path, model, report=lines.append)
    assert lines[0].startswith(f"loaded {count}/{count} tensors from {path}") and lines[0].endswith("rounding 0")
    assert weights_are_golden(model)
    assert any(EXPERT_LM_HEAD in line for line in lines), "what was left out is listed"
    lines.clear()
    narrow = golden_model(CASE, torch.bfloat16)
    CONVERTER.load(path, narrow, report=lines.append)
    largest = max(
        float((released()[k] - released()[k].bfloat16().float()).abs().max())
        for k in released()
        if k != EXPERT_LM_HEAD and dict(narrow.named_parameters())[our_name(k)].dtype == torch.bfloat16
    )
    assert f"{largest:.3g}" in lines[0]


def test_K01_unreadable_and_absent_files_are_findings(tmp_path: Path) -> None:
    path = saved(tmp_path / "cut", released()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    empty = tmp_path / "empty"
    empty.mkdir()
    for place in (path, empty, tmp_path / "nowhere"):
        (finding,) = CONVERTER.check_file(place, CASE.config)
        assert str(place) in finding.what and finding.severity == "error"


def test_K01_a_missing_shard_is_named(tmp_path: Path) -> None:
    CONVERTER.to_native(CASE.weight_files, CASE.config, tmp_path / "n", max_shard_bytes=100_000, report=quiet)
    assert CONVERTER.check_file(tmp_path / "n", CASE.config) == []
    next((tmp_path / "n").glob("model-00002-of-*.safetensors")).unlink()
    (finding,) = CONVERTER.check_file(tmp_path / "n", CASE.config)
    assert "model-00002-of-" in finding.what


# K02: spellings, ties, forward reference ------------------------------------------------------------------------------------


def older_nesting(name: str) -> str:
    return (
        name.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
        .replace("paligemma.lm_head", "paligemma.language_model.lm_head")
        .replace("paligemma.model.vision_tower", "paligemma.vision_tower")
        .replace("paligemma.model.multi_modal_projector", "paligemma.multi_modal_projector")
    )


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: name,
        lambda name: name.replace(".vision_model.", "."),
        older_nesting,
        lambda name: "model." + name,
        lambda name: "model." + name.replace(".vision_model.", "."),
        lambda name: name.replace("time_mlp", "action_time_mlp"),
    ],
    ids=["openpi", "no_vision_model", "older", "lerobot", "lerobot_no_vision_model", "pi0_time"],
)
def test_K02_every_known_spelling_loads(tmp_path: Path, spell: Callable[[str], str]) -> None:
    path = saved(tmp_path, {spell(k): v for k, v in released().items()})
    model = build_module(CASE.config)
    CONVERTER.load(path, model, report=quiet)
    assert weights_are_golden(model)


@pytest.mark.parametrize("names", [(LM_HEAD,), (EMBED_TOKENS,), (LM_HEAD, EMBED_TOKENS)], ids=["lm_head", "embed", "both"])
def test_K02_either_or_both_names_of_the_token_table(tmp_path: Path, names: tuple[str, ...]) -> None:
    tensors = released()
    table = tensors.pop(LM_HEAD)
    path = saved(tmp_path, {**tensors, **{name: table.clone() for name in names}})
    model = build_module(CASE.config)
    CONVERTER.load(path, model, report=quiet)
    assert weights_are_golden(model)


def test_K02_differing_copies_of_the_token_table(tmp_path: Path) -> None:
    """The forward pass reads embed_tokens; a stale lm_head is reported and survives the round trip."""
    tensors = as_lerobot(released())
    tensors[f"model.{LM_HEAD}"] = tensors[f"model.{LM_HEAD}"] + 1
    path = saved(tmp_path / "in", tensors)
    lines: list[str] = []
    model = build_module(CASE.config)
    CONVERTER.load(path, model, report=lines.append)
    assert weights_are_golden(model)
    assert any(LM_HEAD in line and "differs" in line for line in lines)
    CONVERTER.to_native(path, CASE.config, tmp_path / "n", report=quiet)
    CONVERTER.to_released(tmp_path / "n", "lerobot", tmp_path / "out", report=quiet)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_K02_no_token_table_is_refused(tmp_path: Path) -> None:
    tensors = released()
    del tensors[LM_HEAD]
    with pytest.raises(CheckError, match="token_embedding"):
        CONVERTER.load(saved(tmp_path, tensors), build_module(CASE.config), report=quiet)


def test_K02_one_tensor_in_two_spellings_is_refused(tmp_path: Path) -> None:
    tensors = released()
    tensors["action_time_mlp_in.weight"] = tensors["time_mlp_in.weight"].clone()
    with pytest.raises(ValueError, match="two spellings"):
        CONVERTER.load(saved(tmp_path, tensors), build_module(CASE.config), report=quiet)


def golden_reference(folder: Path) -> Path:
    """The community implementation's loss elements as a forward reference."""
    batch = golden_batch(CASE)
    elements = CASE.tensors("forward_fp64")["loss_per_element"]
    path = folder / "reference.safetensors"
    save_file({**{k: v.contiguous() for k, v in batch.tensors().items()}, "loss_elements_BTA": elements}, path)
    return path


def test_K02_forward_pass_is_verified_against_stored_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "in", released())
    reference = golden_reference(tmp_path)
    flags = ["--input", str(source), "--reference", str(reference), *SIZES]
    assert convert_checkpoint.main([*flags, "--output", str(tmp_path / "n"), "--tolerance", "2e-5"]) == 0
    printed = capsys.readouterr().out
    count = len(list(build_module(CASE.config).parameters()))
    assert f"loaded {count}/{count} tensors" in printed and "forward pass on a fixed input: finite" in printed
    assert "differs by" in printed
    tensors = released()
    tensors["paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias"] += 0.1
    wrong = saved(tmp_path / "wrong", tensors)
    flags[1] = str(wrong)
    assert convert_checkpoint.main([*flags, "--output", str(tmp_path / "m")]) == 1
    assert "loss elements differ by" in capsys.readouterr().err


def test_K02_native_folder_remembers_its_forward_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "in", released())
    assert convert_checkpoint.main(["--input", str(source), "--output", str(tmp_path / "n"), *SIZES]) == 0
    assert convert_checkpoint.main(["--input", str(tmp_path / "n"), "--to", "openpi", "--output", str(tmp_path / "o")]) == 0
    assert "differs by 0" in capsys.readouterr().out
    assert (tmp_path / "o/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    native = tmp_path / "n/model.safetensors"
    tensors = load_file(native)
    tensors["vision_projector.bias"] += 0.1
    save_file(tensors, native)
    assert convert_checkpoint.main(["--input", str(tmp_path / "n"), "--to", "openpi", "--output", str(tmp_path / "p")]) == 1
    assert "forward_reference.safetensors" in capsys.readouterr().err


# K04: byte-equal round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["openpi", "lerobot"])
def test_K04_round_trip_is_byte_equal(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    tensors = {k: v.to(dtype) for k, v in released().items()}
    source = saved(tmp_path / "in", tensors if layout == "openpi" else as_lerobot(tensors))
    CONVERTER.to_native(source, CASE.config, tmp_path / "native", report=quiet)
    assert {t.dtype for t in load_file(tmp_path / "native/model.safetensors").values()} == {dtype}
    CONVERTER.to_released(tmp_path / "native", layout, tmp_path / "out", report=quiet)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_K04_round_trip_through_the_other_layout(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", released())
    CONVERTER.to_native(source, CASE.config, tmp_path / "a", report=quiet)
    CONVERTER.to_released(tmp_path / "a", "lerobot", tmp_path / "lerobot", report=quiet)
    found = load_file(tmp_path / "lerobot/model.safetensors")
    expected = as_lerobot(released())
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    CONVERTER.to_native(tmp_path / "lerobot", CASE.config, tmp_path / "b", report=quiet)
    CONVERTER.to_released(tmp_path / "b", "openpi", tmp_path / "out", report=quiet)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_K04_sharded_both_ways(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", released())
    CONVERTER.to_native(source, CASE.config, tmp_path / "native", max_shard_bytes=120_000, report=quiet)
    assert len(list((tmp_path / "native").glob("model-*-of-*.safetensors"))) > 2
    CONVERTER.to_released(tmp_path / "native", "openpi", tmp_path / "shards", max_shard_bytes=90_000, report=quiet)
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == released().keys()
    opened = open_tensors([tmp_path / "shards/model.safetensors.index.json"])
    assert all(torch.equal(opened.read(k), v) for k, v in released().items())


def test_K04_trained_weights_without_extras_get_the_unused_head(tmp_path: Path) -> None:
    """Strict loaders of the released layouts want every name; the head that nothing reads is written as zeros, and said so."""
    model = tiny_model(tiny_config(), torch.float32)
    folder = saved(tmp_path / "iter_0000010", {n: p.detach() for n, p in model.named_parameters()})
    lines: list[str] = []
    CONVERTER.to_released(folder, "lerobot", tmp_path / "out", report=lines.append)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found[f"model.{EXPERT_LM_HEAD}"].shape == (64, 32) and any(EXPERT_LM_HEAD in line for line in lines)
    assert torch.equal(found[f"model.{LM_HEAD}"], found[f"model.{EMBED_TOKENS}"])
    again = build_module(tiny_config())
    CONVERTER.load(tmp_path / "out", again, report=quiet)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_layers": 3}, "--num-layers"),
        ({"num_layers": 1}, "--num-layers"),
        ({"vision_num_layers": 2}, "--vision-num-layers"),
        ({"vocab_size": 201}, "--vocab-size"),
        ({"hidden_size": 64}, "--hidden-size"),
        ({"ffn_hidden_size": 96}, "--ffn-hidden-size"),
        ({"expert_ffn_hidden_size": 44}, "--expert-ffn-hidden-size"),
        ({"kv_channels": 16}, "--kv-channels"),
        ({"num_query_groups": 2}, "--num-query-groups"),
        ({"image_size": 42}, "--image-size"),
        ({"vision_ffn_hidden_size": 44}, "--vision-ffn-hidden-size"),
    ],
    ids=lambda value: str(value),
)
def test_K04_a_wrong_configuration_names_the_flag(tmp_path: Path, changes: dict[str, int], flag: str) -> None:
    path = saved(tmp_path, released())
    findings = CONVERTER.check_file(path, dataclasses.replace(CASE.config, **changes))
    assert findings and all(flag in f"{f.where} {f.fix}" for f in findings), findings


def test_K04_what_shapes_do_not_show_is_compared_too(tmp_path: Path) -> None:
    """24 = 3 x 8 = 2 x 12 vision channels: only the stored configuration tells the heads apart."""
    CONVERTER.to_native(CASE.weight_files, CASE.config, tmp_path / "n", report=quiet)
    (finding,) = CONVERTER.check_file(tmp_path / "n", dataclasses.replace(CASE.config, vision_num_attention_heads=2))
    assert finding.where == "--vision-num-attention-heads" and "3 in" in finding.what


def test_check_runs_in_the_family_check(tmp_path: Path) -> None:
    path = saved(tmp_path, released())
    config = parse_args(["--model-variant", "tiny", "--mock-data", "--pretrained-checkpoint", str(path)])
    assert any("--hidden-size" in f.where for f in FAMILY.check(config))


def test_sizes_are_read_from_the_tensors(tmp_path: Path) -> None:
    sizes = infer_sizes(CONVERTER.our_shapes(saved(tmp_path, released())))
    assert sizes == {name: vars(CASE.config)[name] for name in sizes}
    assert len(sizes) == 14


# K07: parts; C05: partial loading -------------------------------------------------------------------------------------------


def test_K07_assembly_from_vision_and_language_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A SigLIP file, a PaliGemma language file, a random action expert: one native checkpoint."""
    tensors = released()
    prefix = "paligemma_with_expert.paligemma.model.vision_tower."
    vision = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    vision["vision_model.head.probe"], vision["logit_scale"] = torch.zeros(1, 1, 4), torch.zeros(1)
    language = {
        k.removeprefix("paligemma_with_expert.paligemma."): v
        for k, v in tensors.items()
        if k.startswith("paligemma_with_expert.paligemma.") and not k.startswith(prefix)
    }
    expert = ["layers.*.suffix", "suffix_norm", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"]
    words = ["--input", str(saved(tmp_path / "vision", vision)), str(saved(tmp_path / "language", language))]
    sizes = ["--expert-hidden-size", "24", "--expert-ffn-hidden-size", "40", "--max-action-dim", "8", *SIZES]
    assert convert_checkpoint.main([*words, "--output", str(tmp_path / "x"), *sizes]) == 1
    assert "layers.0.suffix" in capsys.readouterr().err
    flags = [*words, "--output", str(tmp_path / "native"), *sizes, "--random-modules", *expert]
    assert convert_checkpoint.main(flags) == 0
    found = load_file(tmp_path / "native/model.safetensors")
    assert found.keys() == dict(build_module(CASE.config).named_parameters()).keys()
    for name, tensor in tensors.items():
        if "paligemma." in name:
            assert torch.equal(found[our_name(name)], tensor), name
    assert found["layers.0.suffix.mlp.up_proj.weight"].std() > 0


def test_C05_wider_actions_reinitialise_named_modules_only(tmp_path: Path) -> None:
    path = saved(tmp_path, released())
    wide = dataclasses.replace(CASE.config, max_action_dim=35)
    findings = CONVERTER.check_file(path, wide)
    text = " ".join(map(str, findings))
    assert "--max-action-dim" in text and "--pretrained-reinitialize" in text and "[24, 8]" in text and "[24, 35]" in text
    modules = ("action_in_proj", "action_out_proj")
    assert CONVERTER.check_file(path, wide, modules) == []
    model = tiny_model(wide, torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    lines: list[str] = []
    CONVERTER.load(path, model, modules, lines.append)
    fresh = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert fresh == {f"{m}.{kind}" for m in modules for kind in ("weight", "bias")}
    assert all(any(name in line for line in lines) for name in fresh), "re-initialised parameters are listed"


def test_C05_a_reinitialize_pattern_must_describe_something(tmp_path: Path) -> None:
    (finding,) = CONVERTER.check_file(saved(tmp_path, released()), CASE.config, ("action_in_porj",))
    assert "action_in_porj" in finding.where and "action_in_proj" in finding.fix


# The key-map language and the tool ------------------------------------------------------------------------------------------


def test_every_parameter_has_one_released_name_and_back() -> None:
    for name, _ in build_module(CASE.config).named_parameters():
        located = PI05_KEYS.to_theirs(name)
        assert located is not None and our_name(located.ours) == name


def test_permuted_axes_go_both_ways() -> None:
    keys = KeyMap(renames=(Rename("img.*.kernel", "layers.*.weight", permute=(3, 2, 0, 1)),))
    located = keys.to_ours("img.4.kernel")
    kernel = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    assert located is not None and located.ours == "layers.4.weight"
    ours = located.rename.to_ours(kernel)
    assert ours.shape == (5, 4, 2, 3) and ours[1, 2, 0, 1] == kernel[0, 1, 2, 1]
    assert torch.equal(located.rename.to_theirs(ours), kernel)


def test_tool_refuses_to_write_over_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "in", released())
    assert convert_checkpoint.main(["--input", str(source), "--output", str(source), *SIZES]) == 1
    assert "--output" in capsys.readouterr().err


def test_loaded_checkpoint_computes_the_golden_loss_in_a_built_model(tmp_path: Path) -> None:
    """The whole path of pretrain_vla: flags, build, load."""
    path = saved(tmp_path, as_lerobot(released()))
    words = ["--mock-data", "--fp64", "--pretrained-checkpoint", str(path)]
    for field, value in dataclasses.asdict(CASE.config).items():
        if not isinstance(value, bool):
            words += ["--" + field.replace("_", "-"), str(value)]
    config = parse_args(words)
    assert FAMILY.check(config) == []
    model = build(config)
    FAMILY.converter.load(config.model.pretrained_checkpoint, model, config.model.pretrained_reinitialize, quiet)
    with torch.no_grad():
        elements = model(replaced(golden_batch(CASE)))
    expected = CASE.tensors("forward_fp64")["loss_per_element"]
    assert float((elements - expected).abs().max() / expected.abs().max()) <= 1e-9
