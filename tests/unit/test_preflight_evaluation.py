"""What evaluation needs is looked at before training: its prompts, and the drafter it compares with."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint import write_checkpoint
from eagle3_train.drafter.checkpoint_format import ServedTarget, expected_tensors
from eagle3_train.stages import evaluate, preflight
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import read_facts
from tests.unit.test_preflight_static import LLAMA, config, target

__all__ = ["target"]
ENGINES = {"vllm_version": "0.23.0", "sglang_version": "0.5.23"}
LONG = "a b c d a c b d a d b c a d c b"


def checked(folder, name, **sections):
    """The check of this name at the static depth."""
    report = preflight.run(config(folder, preflight=ENGINES, **sections), "static", folder)
    (check,) = [check for check in report.checks if check.name == name]
    assert {c.name for c in report.blocking} <= {name}
    assert check.action or check.verdict == "ok"
    return check


def prompts(folder, name, *conversations):
    """A file of conversations given as lists of user turns, or of token ids."""
    rows = [{"turns" if isinstance(row[0], str) else "input_ids": row} for row in conversations]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / name).write_text("".join(lines))
    return str(folder / name)


def test_prompts_that_fit_are_counted_by_file(target, tmp_path):
    asked = prompts(tmp_path, "asked.jsonl", ["a b"], ["c d", "b"], [4] * 60)
    room = {"max_model_len": 300}
    check = checked(
        tmp_path, "evaluate_sources", evaluate={"sources": ["held_out", asked]}, engine=room
    )
    assert (check.verdict, check.reason) == ("ok", "prompts that fit: asked.jsonl 2")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "does not exist"),
        ("", "no rows"),
        ("{", "invalid_json"),
        (json.dumps({"question": "a"}), "no_conversation"),
        (json.dumps({"input_ids": [4] * 60}), "prompt_too_long"),
    ],
)
def test_a_file_without_a_usable_prompt_fails_by_name(content, fault, target, tmp_path):
    file = tmp_path / "asked.jsonl"
    if content is not None:
        file.write_text(content)
    asked = {"sources": [str(file)]}
    check = checked(tmp_path, "evaluate_sources", evaluate=asked, engine={"max_model_len": 300})
    assert (check.verdict, fault in check.reason) == ("fail", True), check
    assert str(file) in check.reason


def test_a_missing_file_is_found_without_a_tokenizer_too(target, tmp_path):
    (target / "tokenizer.json").unlink()
    asked = prompts(tmp_path, "asked.jsonl", ["a b"])
    for sources, verdict in ([asked], "warn"), ([asked, str(tmp_path / "absent.jsonl")], "fail"):
        job = config(tmp_path, preflight=ENGINES, evaluate={"sources": sources})
        found = {check.name: check for check in preflight.run(job, "static", tmp_path).checks}
        assert found["evaluate_sources"].verdict == verdict


def test_prompts_that_the_corpus_trains_on_warn(target, tmp_path):
    asked = prompts(tmp_path, "asked.jsonl", ["a b", "c"], [LONG], ["d d d", LONG])
    trained = prompts(tmp_path, "trained.jsonl", ["A, b!"], [f"d {LONG} c"], ["c c"])
    sections = {"corpus": {"sources": [trained], "held_out_fraction": 0.0}}
    check = checked(tmp_path, "evaluate_sources", evaluate={"sources": [asked]}, **sections)
    assert check.verdict == "warn"
    assert "2 resemble corpus.sources, and follow-ups of 1 do" in check.reason


def test_nothing_to_evaluate_on_warns_and_urls_are_not_looked_at(target, tmp_path):
    none = checked(tmp_path, "evaluate_sources", corpus={"held_out_fraction": 0.0})
    assert (none.verdict, "nothing is held out" in none.reason) == ("warn", True)
    full = checked(tmp_path, "evaluate_sources", engine={"max_model_len": 256})
    assert (full.verdict, "answers fill" in full.reason) == ("warn", True)
    url = {"sources": ["https://nowhere.invalid/asked.jsonl"]}
    assert checked(tmp_path, "evaluate_sources", evaluate=url).verdict == "ok"


def other(job: JobConfig, directory, boundaries=(2, 4, 5)):
    """A drafter as this job would export it."""
    spec = drafter_spec(read_facts(job.target.path), job.drafter)
    weights = {name: torch.zeros(shape) for name, shape in expected_tensors(spec).items()}
    d2t = torch.arange(0, 2 * spec.draft_vocab_size, 2) - torch.arange(spec.draft_vocab_size)
    facts = ServedTarget(num_layers=8)
    write_checkpoint(directory, spec, weights, d2t, boundaries, facts, "float32")
    return directory


def test_another_drafter_of_this_target_may_differ_in_what_is_its_own(target, tmp_path):
    theirs = {"draft_vocab_size": 5, "intermediate_size": 48, "aux_layers": (1, 3, 6)}
    against = other(config(tmp_path, drafter=theirs), tmp_path / "other", (1, 3, 6))
    check = checked(tmp_path, "evaluate_against", evaluate={"against": str(against)})
    assert check.verdict == "ok"
    assert "5 tokens, reading layers (1, 3, 6)" in check.reason


def test_another_drafter_whose_map_vllm_would_take_for_zeros_is_refused(target, tmp_path):
    against = other(config(tmp_path, drafter={"draft_vocab_size": 5}), tmp_path / "other")
    tensors = load_file(against / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, against / "model.safetensors")
    check = checked(tmp_path, "evaluate_against", evaluate={"against": str(against)})
    assert (check.verdict, "holds no d2t" in check.reason) == ("fail", True)


def test_a_warm_start_of_another_shape_is_refused_before_the_rollout(target, tmp_path):
    theirs = {"draft_vocab_size": 5}
    begin = other(config(tmp_path, drafter=theirs), tmp_path / "other")
    same = checked(tmp_path, "boundaries", drafter={"init_from": str(begin), **theirs})
    assert same.verdict == "ok"
    check = checked(tmp_path, "boundaries", drafter={"init_from": str(begin)})
    assert (check.verdict, "draft_vocab_size: 5 there, 12 here" in check.reason) == ("fail", True)


FOREIGN = {
    "a config.json": None,
    "hidden_size 16, not 32": {"hidden_size": 32},
    "vocab_size 12, not 10": {"vocab_size": 10},
    "which do not exist in this target of 4": {"num_hidden_layers": 4},
    "max_position_embeddings 8192 for engine.max_model_len=9000": {"max_position_embeddings": 9000},
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_a_drafter_of_another_target_is_refused_by_preflight_and_before_any_engine_starts(
    fault, target, tmp_path
):
    against = other(config(tmp_path, drafter={"draft_vocab_size": 5}), tmp_path / "other")
    if FOREIGN[fault] is None:
        (against / "config.json").unlink()
        fault = "holds no config.json"
    else:
        (target / "config.json").write_text(json.dumps(LLAMA | FOREIGN[fault]))
    sections = {"evaluate": {"against": str(against), "untrained": False}}
    if "9000" in fault:
        sections["engine"] = {"max_model_len": 9000}
    job = config(tmp_path, preflight=ENGINES, **sections)
    found = {check.name: check for check in preflight.run(job, "static", tmp_path).checks}
    check = found["evaluate_against"]
    assert (check.verdict, fault in check.reason, str(against) in check.reason) == (
        *("fail", True, True),
    )
    drafter = job.run_path / "export" / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=str(against)):
        evaluate.run(job)
