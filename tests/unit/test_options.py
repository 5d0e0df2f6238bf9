import dataclasses

import pytest

from replica import JobError, options, policy, report
from replica.flags import RETIRED
from replica.options import AllreduceOptions


def parse(*argv: str) -> AllreduceOptions:
    return options.parse(list(argv), AllreduceOptions)


def refusal(*argv: str) -> str:
    with pytest.raises(JobError) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_seeds():
    opts = parse()
    assert opts == AllreduceOptions()
    assert (opts.hidden_units, opts.train_steps, opts.batch_size) == (100, 200, 100)
    assert (opts.learning_rate, opts.num_gpus) == (0.01, 1)
    assert opts.replicas_to_aggregate is None


def test_hyphens_and_underscores_mean_the_same():
    flags = ["hidden_units=7", "train_steps=9", "no-deterministic", "batch_size=3"]
    underscored = parse(*(f"--{flag}" for flag in flags))
    assert underscored == parse(*(f"--{flag.replace('_', '-')}" for flag in flags))
    assert underscored.hidden_units == 7


def test_the_environment_may_name_the_data_and_a_flag_is_stronger(monkeypatch):
    monkeypatch.setenv("REPLICA_DATA_DIR", "/data")
    assert parse().data_dir == "/data"
    assert parse("--data_dir", "here").data_dir == "here"


def test_values_keep_their_hyphens_and_underscores():
    assert parse("--data-dir=a-b_c").data_dir == "a-b_c"
    assert parse("--data_dir", "a-b_c").data_dir == "a-b_c"


def test_switches_take_values_as_in_tensorflow_1():
    assert parse("--deterministic=True").deterministic
    assert not parse("--deterministic=false").deterministic
    assert parse("--deterministic", "--no-deterministic") == AllreduceOptions()


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().seed = 3


@pytest.mark.parametrize("name", RETIRED)
@pytest.mark.parametrize("form", ["--{}=x", "--{}", "--{}:x"])
def test_retired_flags_say_what_to_write_instead(name, form):
    flag = form.format(name).split(":")
    message = refusal(*flag)
    assert name in message
    assert "python train.py" in message


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("train_steps", "0", "at least 1"),
        ("train_steps", "1.5", "whole number"),
        ("batch_size", "-3", "at least 1"),
        ("hidden_units", "many", "whole number"),
        ("learning_rate", "nan", "above 0"),
        ("learning_rate", "0", "above 0"),
        ("learning_rate", "inf", "to 3.4"),
        ("learning_rate", "1e300", "to 3.4"),
        ("learning_rate", "1e-300", "from 1.1"),
        ("clip_norm", "1e300", "to 3.4"),
        ("stall_timeout", "9" * 20, "to 2147483647"),
        ("target_accuracy", "1.1", "at most 1"),
        ("clip_norm", "-1", "at least 0"),
        ("num_classes", "1", "from 2 to 256"),
        ("seed", "-1", "from 0"),
        ("num_gpus", "-1", "at least 0"),
        ("replicas_to_aggregate", "0", "at least 1"),
        ("lr_scaling", "cubic", "none"),
        ("data_dir", "", "a folder"),
        ("mirrors", "", "addresses"),
        ("straggler", "1", "RANK:MILLISECONDS, as 1:50"),
        ("straggler", "1:-5", "RANK:MILLISECONDS, as 1:50"),
        ("straggler", "1:soon", "RANK:MILLISECONDS, as 1:50"),
        ("optimizer", "lamb", "adam"),
        ("momentum", "1", "to below 1"),
        ("mirrors", "/mnt/m", "http:// or https:// addresses"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(flag, value, expected):
    message = refusal(f"--{flag}={value}")
    assert flag in message
    assert value in message
    assert expected in message


def test_a_straggler_waits_at_every_step_and_no_other_rank_does():
    opts = parse("--straggler=1:50")
    assert [opts.delay(rank) for rank in range(3)] == [0, 0.05, 0]
    assert str(opts.straggler) == "1:50"
    opts.check_straggler(range(2))
    with pytest.raises(JobError, match="trains, 0 to 0, found 1"):
        opts.check_straggler(range(1))


def test_unknown_and_abbreviated_flags_are_refused():
    assert "--nothing" in refusal("--nothing")
    assert "--train" in refusal("--train", "3")


def test_flags_that_contradict_the_program_are_refused():
    assert "ps_mode.py" in refusal("--no-sync_replicas")
    assert "--data_dir" in refusal("--download_only")


def test_replicas_to_aggregate_is_a_multiple_of_the_replicas():
    assert parse().passes_per_update(3) == 1
    assert parse("--replicas_to_aggregate=6").passes_per_update(3) == 2
    for wrong in (2, 4):
        opts = parse(f"--replicas_to_aggregate={wrong}")
        with pytest.raises(JobError, match=rf"3 replicas, found {wrong}.*ps_mode.py"):
            opts.passes_per_update(3)


def test_learning_rate_rules():
    rates = [
        policy.batch_scaled_rate(0.01, rule, 4) for rule in ("none", "sqrt", "linear")
    ]
    assert rates == pytest.approx([0.01, 0.02, 0.04])


def test_too_few_samples_are_refused_with_the_numbers():
    opts = parse("--batch_size=50")
    opts.check_samples(400, 4, 8)
    with pytest.raises(JobError, match=r"400 training.*4 replicas x 2.*50.*found 399"):
        opts.check_samples(399, 4, 8)


def test_evaluations_end_with_the_last_step():
    def steps(*flags):
        opts, step = parse(*flags), 0
        while step < opts.train_steps:
            step = opts.next_evaluation(step)
            yield step

    assert list(steps("--train_steps=250")) == [100, 200, 250]
    assert list(steps("--train_steps=200")) == [100, 200]
    assert list(steps("--eval_every=0")) == [200]


def test_disagreement_names_option_values_and_ranks():
    asked = [{"hidden_units": 100}, {"hidden_units": 100}, {"hidden_units": 64}]
    assert report.disagreement(asked[:2]) is None
    assert report.disagreement(asked) == (
        "ranks disagree on hidden_units: 100 (rank 0), 64 (rank 2)"
    )


def test_a_scaled_rate_fits_float32():
    assert policy.batch_scaled_rate(1e38, "linear", 3) == 3e38
    with pytest.raises(JobError, match=r"at most 3\.4.*found 4e"):
        policy.batch_scaled_rate(1e38, "linear", 4)


def test_a_switch_is_true_or_false():
    message = refusal("--download_only=maybe")
    assert message == "--download_only: expected true or false, found 'maybe'"
    assert "found 'maybe'" in refusal("--no-sync_replicas=maybe")


def test_ranks_that_differ_are_named():
    ranks = [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}]
    found = report.disagreement(ranks)
    assert found == "ranks disagree on b: 2 (rank 1), 3 (rank 3)"
    assert report.disagreement([{"a": 4}, *ranks]) == (
        "ranks disagree on a: 4 (rank 0), 1 (rank 1)"
    )
    assert report.disagreement(ranks[:3]) is None
