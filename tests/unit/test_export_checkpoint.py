"""A written checkpoint reads back; every way to spoil one is refused by name; other projects' layouts are understood."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train.drafter.checkpoint import (
    membership,
    read_checkpoint,
    validate_checkpoint,
    write_checkpoint,
)
from eagle3_train.drafter.checkpoint_format import (
    ExportError,
    ServedTarget,
    expected_tensors,
    sglang_layer_ids,
)
from eagle3_train.drafter.spec import DrafterSpec, RopeSpec
from tests.unit.drafter_cases import llama_spec, mla_spec

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]

YARN = RopeSpec("yarn", 50_000.0, 64.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
LLAMA3 = RopeSpec("llama3", 500_000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 64,
    "draft_vocab_size": 32,
    "max_position_embeddings": 512,
}
LLAMA_SPEC = llama_spec(**SIZES, head_dim=8, rope=LLAMA3)
HEADS = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MLA_SPEC = mla_spec(**SIZES, **HEADS, **LATENT, rope=YARN)
TARGET = ServedTarget(num_layers=8, serving_len=512, required_tokens=(0, 2))
BOUNDARIES = (2, 4, 5)
D2T = torch.arange(0, 64, 2) - torch.arange(32)


def weights(spec: DrafterSpec) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in expected_tensors(spec).items()}


def write(directory: Path, spec: DrafterSpec = LLAMA_SPEC, **options: Any) -> Path:
    d2t = None if spec.full_vocab else D2T
    write_checkpoint(directory, spec, weights(spec), d2t, BOUNDARIES, TARGET, "float32", **options)
    return directory


def check(directory: Path, spec: DrafterSpec = LLAMA_SPEC) -> None:
    validate_checkpoint(directory, spec, BOUNDARIES, TARGET)


VARIANTS = [
    LLAMA_SPEC,
    MLA_SPEC,
    replace(LLAMA_SPEC, draft_vocab_size=64),
    mla_spec(**SIZES, **HEADS, **LATENT | {"q_lora_rank": None}, rope=YARN),
    replace(LLAMA_SPEC, num_layers=2, fc_norm=True, norm_before_fc=True, norm_output=True),
]


@pytest.mark.parametrize(
    "spec", VARIANTS, ids=["llama", "mla", "full-vocab", "mla-full-q", "eagle-3.1"]
)
def test_what_is_written_validates_and_reads_back_equal(tmp_path: Path, spec: DrafterSpec) -> None:
    directory = write(tmp_path / "drafter", spec)
    check(directory, spec)
    found, tensors, d2t, boundaries = read_checkpoint(directory)
    assert found == spec
    assert boundaries == BOUNDARIES
    assert (d2t is None) if spec.full_vocab else torch.equal(d2t, D2T)  # type: ignore[arg-type]
    for name, tensor in weights(spec).items():
        assert torch.equal(tensors[name], tensor), name


def test_many_shards_hold_the_same_weights_as_one(tmp_path: Path) -> None:
    one, many = write(tmp_path / "one"), write(tmp_path / "many", max_shard_bytes=3000)
    files = list(many.glob("*.safetensors"))
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in load_file(one / "model.safetensors").values()
    )
    check(many)
    left, right = read_checkpoint(one)[1], read_checkpoint(many)[1]
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_newer_export_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "drafter", max_shard_bytes=3000)
    write(tmp_path / "drafter")
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]
    assert sorted(p.name for p in (tmp_path / "drafter").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_an_export_that_fails_midway_keeps_the_older_one(tmp_path: Path) -> None:
    write(tmp_path / "drafter")
    with pytest.raises(ExportError):
        write_checkpoint(
            tmp_path / "drafter",
            LLAMA_SPEC,
            weights(LLAMA_SPEC),
            D2T,
            (1, 4, 5),
            replace(TARGET, sglang_ids="deepseek"),
        )
    check(tmp_path / "drafter")


def test_what_a_killed_export_left_goes_once_another_is_in_place(tmp_path: Path) -> None:
    write(tmp_path / "drafter").rename(tmp_path / ".drafter.old")  # killed between its renames
    (tmp_path / ".drafter.tmp").mkdir()
    broken = weights(LLAMA_SPEC)
    broken["fc.weight"][0, 0] = float("nan")
    with pytest.raises(ExportError, match="not finite"):
        write_checkpoint(
            tmp_path / "drafter", LLAMA_SPEC, broken, D2T, BOUNDARIES, TARGET, "float32"
        )
    check(tmp_path / ".drafter.old")  # the only good one until then
    write(tmp_path / "drafter")
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_weights_that_cannot_be_served_replace_nothing(tmp_path: Path) -> None:
    write(tmp_path / "drafter")
    broken = weights(LLAMA_SPEC)
    broken["fc.weight"][0, 0] = float("nan")
    with pytest.raises(ExportError, match="not finite"):
        write_checkpoint(
            tmp_path / "drafter", LLAMA_SPEC, broken, D2T, BOUNDARIES, TARGET, "float32"
        )
    check(tmp_path / "drafter")
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def edit_config(change: Callable[[Json], Any]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        change(config)
        (directory / "config.json").write_text(json.dumps(config))

    return spoil


def edit_tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return spoil


def unsorted(tensors: Tensors) -> None:
    tensors["d2t"][[3, 4]] = tensors["d2t"][[4, 3]] + torch.tensor([1, -1])


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


CORRUPTIONS: list[tuple[Callable[[Path], None], str]] = [
    (edit_tensors(lambda t: t.pop("d2t")), "missing tensor d2t"),
    (edit_tensors(lambda t: t.pop("t2d")), "missing tensor t2d"),
    (edit_tensors(lambda t: t["d2t"].zero_()), "d2t is all zeros"),
    (edit_tensors(unsorted), "d2t is unsorted"),
    (edit_tensors(lambda t: t["d2t"].__setitem__(-1, 60)), "leaves the target vocabulary"),
    (edit_tensors(lambda t: t.update(d2t=t["d2t"].int())), "d2t is torch.int32"),
    (edit_tensors(lambda t: t["t2d"].__setitem__(0, False)), "t2d is not the bool mask"),
    (edit_tensors(lambda t: drop_eos(t)), r"lacks special tokens \[2\]"),
    (edit_tensors(lambda t: t.pop("norm.weight")), "missing tensor norm.weight"),
    (edit_tensors(lambda t: t.update(surplus=torch.ones(1))), "extra tensor surplus"),
    (edit_tensors(lambda t: t.update({"embed_tokens.weight": torch.ones(1)})), "extra tensor emb"),
    (edit_tensors(lambda t: t.update({FC: t[FC].bfloat16()})), "bfloat16, config.json says"),
    (edit_tensors(lambda t: t[FC].__setitem__((0, 0), float("nan"))), "fc.weight holds values"),
    (truncate, r"model\.safetensors cannot be used: Saf"),
    (lambda d: save_file(SURPLUS, d / "consolidated.safetensors"), "file consolidated.safetensors"),
    (lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
    (lambda d: (d / "config.json").unlink(), "holds no config.json"),
    (lambda d: (d / "config.json").write_text("{"), r"config\.json cannot be used: Exp"),
]
FC = "fc.weight"
SURPLUS = {"norm.weight": torch.ones(16)}
NESTED = "eagle_aux_hidden_state_layer_ids"
WRONG: list[tuple[str, Any]] = [
    ("vocab_size", 32),
    ("hidden_size", 8),
    ("max_position_embeddings", 256),
    ("rope_parameters", None),
    ("rope_scaling", None),
    ("rope_theta", None),
    ("rope_theta", 1e4),
    ("num_aux_hidden_states", 4),
    ("num_aux_hidden_states", None),
    (NESTED, [4, 2, 5]),
    ("eagle_config", {NESTED: [2, 4, 5]}),
    ("norm_before_residual", True),
    ("norm_before_residual", None),
    ("norm_output", True),
    ("num_key_value_heads", 4),
    ("architectures", ["LlamaForCausalLM"]),
    ("dtype", None),
]
"""(key of config.json, wrong value; None: the key is missing)"""


def drop_eos(tensors: Tensors) -> None:
    ids = torch.arange(32) + tensors["d2t"]
    ids[1] = 3
    tensors["d2t"] = ids - torch.arange(32)
    tensors["t2d"] = membership(tensors["d2t"], 64)


@pytest.mark.parametrize(("spoil", "fault"), CORRUPTIONS, ids=[c[1] for c in CORRUPTIONS])
def test_a_spoilt_checkpoint_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], None], fault: str
) -> None:
    directory = write(tmp_path / "drafter")
    spoil(directory)
    with pytest.raises(ValueError, match=fault):
        check(directory)


IMPORTED: list[tuple[Callable[[Tensors], Any], str]] = [
    (lambda t: t["d2t"].zero_(), "d2t is all zeros"),
    (lambda t: unsorted(t), "d2t is unsorted"),
    (lambda t: t["d2t"].__setitem__(-1, 60), "leaves the target vocabulary"),
    (lambda t: t.update(d2t=t["d2t"].float()), "d2t is torch.float32"),
    (lambda t: t.update(d2t=t["d2t"][:-1].clone()), "maps 31 draft tokens of 32"),
    (lambda t: t["t2d"].__setitem__(0, False), "t2d is not the bool mask"),
    (lambda t: t.update(t2d=t["t2d"][:-1].clone()), "t2d is not the bool mask"),
    (lambda t: (t.pop("d2t"), t["t2d"].__setitem__(0, False)), "maps 31 draft tokens of 32"),
    (lambda t: (t.pop("d2t"), t.pop("t2d")), "without d2t or t2d"),
]


@pytest.mark.parametrize(("spoil", "fault"), IMPORTED)
def test_another_drafters_vocabulary_that_maps_wrongly_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Tensors], Any], fault: str
) -> None:
    directory = write(tmp_path / "drafter")
    edit_tensors(spoil)(directory)
    with pytest.raises(ExportError, match=f"{directory}: .*{fault}"):
        read_checkpoint(directory)


def test_maps_of_other_integer_types_are_read_and_one_that_renumbers_everything_is_not(
    tmp_path: Path,
) -> None:
    directory = write(tmp_path / "drafter")
    edit_tensors(lambda t: t.update(d2t=t["d2t"].int(), t2d=t["t2d"].int()))(directory)
    d2t = read_checkpoint(directory).d2t
    assert d2t is not None
    assert torch.equal(d2t, D2T)
    whole = write(tmp_path / "whole", replace(LLAMA_SPEC, draft_vocab_size=64))
    edit_tensors(lambda t: t.update(d2t=torch.ones(64, dtype=torch.int64)))(whole)
    with pytest.raises(ExportError, match="d2t renumbers"):
        read_checkpoint(whole)


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_every_wrong_or_missing_key_of_the_configuration_is_named(
    tmp_path: Path, key: str, value: Any
) -> None:
    directory = write(tmp_path / "drafter")
    edit_config(lambda c: c.pop(key) if value is None else c.update({key: value}))(directory)
    with pytest.raises(ExportError, match=f"{key} is .*, must be"):
        check(directory)


@pytest.mark.parametrize("key", ["sliding_window", "quantization_config"])
def test_a_key_that_no_drafter_of_ours_has_is_refused(tmp_path: Path, key: str) -> None:
    directory = write(tmp_path / "drafter")
    edit_config(lambda config: config.update({key: True}))(directory)
    with pytest.raises(ExportError, match=f"{key} is no part of this drafter"):
        check(directory)


def test_a_wrong_shape_is_refused_in_bfloat16_too(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "d", LLAMA_SPEC, weights(LLAMA_SPEC), D2T, BOUNDARIES, TARGET, "bfloat16"
    )
    check(tmp_path / "d")
    edit_tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].contiguous()}))(
        tmp_path / "d"
    )
    with pytest.raises(ExportError, match=r"fc.weight has shape \(16, 47\), expected \(16, 48\)"):
        check(tmp_path / "d")


def test_an_mla_drafter_that_would_load_as_mtp_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "drafter", MLA_SPEC)
    edit_config(lambda c: c.update(model_type="deepseek_v3"))(directory)
    with pytest.raises(ExportError, match="model_type is deepseek_v3, must be kimi_k2"):
        check(directory, MLA_SPEC)


def test_fewer_positions_than_are_served_are_refused(tmp_path: Path) -> None:
    short = replace(LLAMA_SPEC, max_position_embeddings=256)
    with pytest.raises(ExportError, match="max_position_embeddings 256 is below the serving"):
        write(tmp_path / "drafter", short)


@pytest.mark.parametrize(
    ("reads", "boundaries", "ids"),
    [
        ("output", (2, 30, 58), None),
        ("deepseek", (2, 30, 58), None),
        ("output_always", (2, 30, 58), [1, 29, 57]),  # its default would tap one layer too late
        ("output", (3, 20, 40), [2, 19, 39]),
        ("boundary", (3, 20, 40), [3, 20, 40]),
        ("deepseek", (2, 20, 40), [1, 19, 39]),  # a first id of 1 adds 1 to all
        ("deepseek", (3, 20, 40), [3, 20, 40]),  # any other: as they are
    ],
)
def test_sglang_gets_ids_only_where_its_default_means_something_else(
    reads: Any, boundaries: tuple[int, ...], ids: list[int] | None
) -> None:
    assert sglang_layer_ids(boundaries, 61, reads) == ids


@pytest.mark.parametrize(
    ("reads", "boundaries"), [("deepseek", (1, 20, 40)), ("output", (0, 20, 40))]
)
def test_boundaries_sglang_cannot_spell_are_refused(
    reads: Any, boundaries: tuple[int, ...]
) -> None:
    with pytest.raises(ExportError, match="cannot be spelt for SGLang"):
        sglang_layer_ids(boundaries, 61, reads)


def rewrite(directory: Path, rename: Callable[[str], str], config: Callable[[Json], Json]) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({rename(name): t for name, t in tensors.items()}, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text()))))


def specforge(config: Json) -> Json:
    """As SpecForge and AQ-MedAI publish: one RoPE schema, nested ids, neither counts nor switches."""
    gone = ("rope_parameters", "num_aux_hidden_states", "norm_before_residual", NESTED)
    kept = {k: v for k, v in config.items() if k not in (*gone, "norm_output", "fc_norm")}
    return kept | {"eagle_config": {NESTED: [2, 4, 5], "use_aux_hidden_state": True}}


def torchspec(config: Json) -> Json:
    """As TorchSpec and lightseek publish latent attention: SGLang's ids, the target's own YaRN keys."""
    return specforge(config) | {
        "eagle_config": {NESTED: [1, 3, 4], "use_aux_hidden_state": True},
        "rope_scaling": {k: v for k, v in config["rope_scaling"].items() if k != "rope_type"},
        "first_k_dense_replace": 1,
    }


def speculators(config: Json) -> Json:
    """As the speculators library writes: the layer's configuration inside, defaults left out or null."""
    outside = ("draft_vocab_size", NESTED, "architectures", "norm_before_residual", "rope_theta")
    layer = {k: v for k, v in config.items() if k not in (*outside, "num_aux_hidden_states")}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "target_hidden_size": None,
        NESTED: config[NESTED],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": layer,
    }


def as_layer(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


LAYOUTS: list[tuple[str, DrafterSpec, Callable[[str], str], Callable[[Json], Json], bool]] = [
    ("specforge", LLAMA_SPEC, lambda n: n, specforge, False),
    ("aq-medai", replace(LLAMA_SPEC, num_kv_heads=4), lambda n: n, specforge, True),
    ("specforge-trainer", LLAMA_SPEC, lambda n: f"draft_model.{n}", specforge, False),
    ("torchspec", MLA_SPEC, lambda n: n, torchspec, True),
    ("lightseek", replace(MLA_SPEC, draft_vocab_size=64), lambda n: n, torchspec, True),
    ("model-prefix", LLAMA_SPEC, lambda n: f"model.{as_layer(n)}", specforge, True),
    ("speculators", LLAMA_SPEC, as_layer, speculators, True),
]


@pytest.mark.parametrize(
    ("spec", "rename", "config", "embedding"), [c[1:] for c in LAYOUTS], ids=[c[0] for c in LAYOUTS]
)
def test_other_projects_layouts_read_as_the_same_drafter(
    tmp_path: Path,
    spec: DrafterSpec,
    rename: Callable[[str], str],
    config: Callable[[Json], Json],
    embedding: bool,
) -> None:
    directory = write(tmp_path / "drafter", spec)
    rewrite(directory, lambda n: n if n in ("d2t", "t2d") else rename(n), config)
    if embedding:
        edit_tensors(lambda t: t.update({rename("embed_tokens.weight"): torch.ones(64, 16)}))(
            directory
        )
    found, tensors, d2t, boundaries = read_checkpoint(directory, spec)
    assert (found, boundaries) == (spec, BOUNDARIES)
    assert (d2t is None) == spec.full_vocab
    assert d2t is None or torch.equal(d2t, D2T)
    expected = weights(spec)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


FACTS = {"target": "models/target", "num_speculative_tokens": 3}


@pytest.mark.parametrize("spec", [VARIANTS[0], VARIANTS[2], VARIANTS[4]])
def test_the_speculators_layout_validates_and_reads_back_as_the_same_drafter(
    tmp_path: Path, spec: DrafterSpec
) -> None:
    directory = write(tmp_path / "drafter", spec, layout="speculators", metadata=FACTS)
    check(directory, spec)
    assert read_checkpoint(directory, spec).boundaries == BOUNDARIES
    written = json.loads((directory / "config.json").read_text())
    assert written["transformer_layer_config"]["vocab_size"] == 64
    assert written["speculators_config"]["verifier"]["name_or_path"] == "models/target"
    assert not any(n.startswith("midlayer") for n in load_file(directory / "model.safetensors"))
    edit_tensors(lambda t: t.update({"midlayer.x": t.pop("layers.0.hidden_norm.weight")}))(
        directory
    )
    with pytest.raises(ExportError, match=r"missing tensor layers.0.hidden_norm.weight"):
        check(directory, spec)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Nonsense"]),
        ("speculators_model_type", "dflash"),
        ("speculators_config", None),
        ("quantization_config", {"quant_method": "fp8"}),
        ("target_hidden_size", 7),
    ],
)
def test_the_speculators_layouts_own_section_is_validated(
    key: str, value: Any, tmp_path: Path
) -> None:
    directory = write(tmp_path / "drafter", layout="speculators", metadata=FACTS)
    edit_config(lambda config: config.update({key: value}))(directory)
    with pytest.raises(ExportError, match=key):
        check(directory)


def test_an_index_that_leaves_out_a_tensor_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "drafter", max_shard_bytes=3000)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ExportError, match=r"norm.weight is in the index or in its files, not in"):
        check(directory)


def test_the_speculators_layout_refuses_latent_attention(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"set export.format=eagle3"):
        write(tmp_path / "drafter", MLA_SPEC, layout="speculators", metadata=FACTS)


def test_an_absent_d2t_is_rebuilt_from_t2d_and_a_shared_embedding_is_dropped_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(tmp_path / "drafter")
    edit_tensors(lambda t: (t.pop("d2t"), t.update({"embed_tokens.weight": torch.ones(64, 16)})))(
        directory
    )
    _, tensors, d2t, _ = read_checkpoint(directory)
    assert d2t is not None
    assert torch.equal(d2t, D2T)
    assert "embed_tokens.weight" not in tensors
    assert "embedding is ignored" in caplog.text


def test_a_pickled_checkpoint_is_not_opened(tmp_path: Path) -> None:
    directory = write(tmp_path / "drafter")
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="is a pickle and is not opened"):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (edit_config(lambda c: c.update(norm_before_residual=True)), "norm_before_residual"),
        (
            edit_tensors(lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)})),
            "q_norm",
        ),
        (edit_tensors(lambda t: t.pop("fc.weight")), "not an EAGLE-3 drafter"),
        (edit_tensors(lambda t: (t.pop("d2t"), t.pop("t2d"))), "without d2t or t2d"),
        (edit_config(lambda c: c.update(hidden_act="gelu")), "hidden_act is gelu"),
        (edit_config(lambda c: c.pop("hidden_size")), "names no 'hidden_size'"),
        (edit_config(lambda c: c.update(kv_lora_rank=8)), "names no 'qk_nope_head_dim'"),
    ],
)
def test_a_foreign_architecture_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], None], fault: str
) -> None:
    directory = write(tmp_path / "drafter")
    spoil(directory)
    with pytest.raises(ExportError, match=fault):
        read_checkpoint(directory)


def test_another_shape_is_refused_before_any_weight_is_used(tmp_path: Path) -> None:
    directory = write(tmp_path / "drafter")
    longer = replace(LLAMA_SPEC, max_position_embeddings=1024)
    assert read_checkpoint(directory, longer).spec == LLAMA_SPEC
    with pytest.raises(ExportError, match="intermediate_size: 24 there, 32 here"):
        read_checkpoint(directory, replace(LLAMA_SPEC, intermediate_size=32))


QUANTISED: list[tuple[Callable[[Path], None], str]] = [
    (edit_tensors(lambda t: t.update({FC: t[FC].to(torch.float8_e4m3fn)})), r"fc.weight \(float8"),
    (edit_tensors(lambda t: t.update({"fc.weight_packed": t.pop(FC).int()})), r"packed \(int32"),
    (edit_tensors(lambda t: t.update({"fc.weight_scale": torch.ones(1)})), "fc.weight_scale"),
    (edit_config(lambda c: c.update(quantization_config={"bits": 4})), "quantization_config"),
]


@pytest.mark.parametrize(("spoil", "fault"), QUANTISED)
def test_a_quantised_drafter_is_refused_with_what_to_do(
    tmp_path: Path, spoil: Callable[[Path], None], fault: str
) -> None:
    directory = write(tmp_path / "drafter")
    spoil(directory)
    with pytest.raises(ExportError, match=f"is quantised: .*{fault}.*; name the checkpoint it was"):
        read_checkpoint(directory)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_drafter_with_weights_that_are_not_finite_is_refused_by_tensor(
    tmp_path: Path, value: float
) -> None:
    directory = write(tmp_path / "drafter")
    edit_tensors(lambda t: t["norm.weight"].__setitem__(3, value))(directory)
    with pytest.raises(ExportError, match=f"{directory}: norm.weight holds values"):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    "rope",
    [
        replace(LLAMA3, theta=10_000.0),
        replace(LLAMA3, factor=32.0),
        RopeSpec("linear", LLAMA3.theta, LLAMA3.factor),
    ],
    ids=["theta", "factor", "type"],
)
def test_a_warm_start_says_that_another_rope_gives_way_to_the_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rope: RopeSpec
) -> None:
    directory = write(tmp_path / "drafter", replace(LLAMA_SPEC, rope=rope))
    read_checkpoint(directory)  # measured as it is, with its own
    read_checkpoint(directory, replace(LLAMA_SPEC, rope=rope))
    assert not caplog.text
    read_checkpoint(directory, LLAMA_SPEC)
    there, here = rope.parameters(), LLAMA3.parameters()
    assert f"trained with RoPE {there}; the target's is used instead: {here}" in caplog.text
