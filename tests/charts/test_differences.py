"""charts/differences.py: the names of runs, what differs between them, and which should have the same losses."""

import pytest

from charts.differences import agreeing, differences, in_common, names

BASE = {
    **{"out_dir": "out", "dataset": "d", "batch_size": 4, "gradient_accumulation_steps": 2, "dropout": 0.0, "seed": 1},
    **{"learning_rate": 0.001, "n_layer": 2, "use_zero1": True, "zero1_impl": "sharded", "shard_gradients": False},
    **{"param_dtype": "float32", "max_iters": 100, "implementation": "sharded", "world_size": 2, "micro_steps": 1},
    **{
        "devices": ["cpu", "cpu"],
        "versions": {"torch": "2.13.0"},
        "git_commit": "abc",
        "parameters": 800_000,
        "state": "ended",
    },
}
ADAMW = BASE | {"implementation": "adamw", "use_zero1": False}


def named(*facts, folders=None):
    return names(facts, folders or [f"runs/x{place}" for place in range(len(facts))])


def test_a_name_is_what_differs():
    assert named(BASE, ADAMW) == ["sharded", "adamw"]
    assert named(BASE | {"learning_rate": 3e-4}, BASE) == ["learning_rate=0.0003", "learning_rate=0.001"]
    one_rank = ADAMW | {"dataset": "other", "world_size": 1, "devices": ["cpu"], "micro_steps": 2, "out_dir": "b"}
    assert named(one_rank, ADAMW) == ["dataset=other, 1 rank", "dataset=d, 2 ranks"], "today's adamw, 1 rank and adamw, 2 ranks"
    assert named(BASE, BASE | {"shard_gradients": True}, ADAMW) == [
        "sharded, shard_gradients=False",
        "sharded, shard_gradients=True",
        "adamw",
    ]


def test_what_says_nothing_is_no_difference():
    same = {"out_dir": "y", "wandb_run_name": "b", "state": "killed", "init_from": "resume", "parts": [], "devices": ["cpu"]}
    assert differences([BASE, BASE | same]) == [{}, {}]
    without = {key: value for key, value in BASE.items() if key != "seed"}
    assert differences([BASE, without]) == [{}, {}], "an older run.json does not have all settings"


def test_a_name_has_four_differences_and_the_table_all():
    other = BASE | {"dataset": "e", "learning_rate": 0.1, "n_layer": 3, "batch_size": 5, "seed": 2, "sample_interval": 3}
    first, second = BASE | {"sample_interval": 0}, other
    assert named(first, second)[1] == "dataset=e, learning_rate=0.1, n_layer=3, batch_size=5"
    assert list(differences([first, second])[1].values()) == [
        *("dataset=e", "learning_rate=0.1", "n_layer=3", "batch_size=5", "seed=2", "sample_interval=3"),
    ]


def test_runs_with_the_same_name_have_their_folder():
    assert named(BASE, BASE) == ["x0", "x1"]
    assert named(BASE, BASE, ADAMW) == ["sharded, x0", "sharded, x1", "adamw"]
    assert named(BASE, BASE, folders=["/a/x", "/b/x"]) == ["/a/x", "/b/x"]
    assert named({}, {}) == ["x0", "x1"]
    assert named(BASE, {}) == ["x0", "x1"]


def test_a_single_run_is_its_implementation_and_its_ranks():
    assert named(ADAMW | {"world_size": 1}) == ["adamw, 1 rank"]
    assert named({}) == named({"implementation": "torch"}) == ["x0"]
    assert names([{}], ["runs/y/."]) == ["y"]
    parts = [{"implementation": "sharded", "world_size": 2}, {"implementation": "torch", "world_size": 1}]
    changed = BASE | {"implementation": "torch", "world_size": 1, "parts": parts}
    assert named(changed) == ["sharded, 2 ranks then torch, 1 rank"]
    assert named(changed, ADAMW) == ["sharded then torch, 2 ranks then 1 rank", "adamw, 2 ranks"]


def test_how_often_a_run_logs_makes_no_difference():
    assert differences([BASE | {"log_interval": interval} for interval in (1, 7)]) == [{}, {}]
    found = differences([BASE | {"eval_interval": interval} for interval in (1, 7)])
    assert found == [{"eval_interval": "eval_interval=1"}, {"eval_interval": "eval_interval=7"}]


def test_what_runs_have_in_common():
    assert in_common([BASE, ADAMW]) == ["d", "0.80M parameters", "2 ranks"]
    assert in_common([BASE]) == ["d", "0.80M parameters", "sharded", "2 ranks"]
    assert in_common([{}, BASE]) == []


SAME = [
    {"implementation": "torch"},
    {"world_size": 4, "devices": ["cpu"] * 4},
    {"batch_size": 8, "gradient_accumulation_steps": 1},
    {"shard_gradients": True, "max_iters": 50, "git_commit": "def"},
    {"log_interval": 7, "eval_interval": 9},
    {"state_dtype": "float32", "zero_bucket_mb": "auto", "param_dtype": "float32"},  # an older run.json has fewer settings
]
OTHERS = [
    {"dataset": "e"},
    {"learning_rate": 0.1},
    {"batch_size": 5},
    {"seed": 2},
    {"param_dtype": "bfloat16"},
    {"state_dtype": "int8"},
    {"z_loss": 0.1},
]


@pytest.mark.parametrize("changed", SAME, ids=str)
def test_runs_that_should_agree(changed):
    assert agreeing([BASE, BASE | {"seed": 7}, BASE | changed]) == [[0, 2]]


def test_every_way_to_hold_the_state_should_agree():
    """The settings that run.json has of a run with ShardedOptimizer count only if they are not the defaults."""
    sharded = BASE | {"state_dtype": "float32", "zero_bucket_mb": "auto", "zero_shard_size": 0}
    others = [sharded | {"implementation": name, "world_size": size} for name, size in (("adamw", 1), ("torch", 2))]
    assert agreeing([sharded, *others, sharded | {"zero_bucket_mb": 2.0, "zero_shard_size": 1}]) == [[0, 1, 2, 3]]
    rounded = [BASE | {"param_dtype": dtype} for dtype in ("bfloat16", "bfloat16_remainder", "float32")]
    assert agreeing(rounded) == [[0, 1]], "remainders hold the same values"


def test_a_run_that_was_resumed_should_agree_with_one_that_was_not():
    begun = [BASE | {"init_from": how} for how in ("scratch", "resume", "auto", "gpt2")]
    assert agreeing(begun) == [[0, 1, 2]]


@pytest.mark.parametrize("changed", OTHERS, ids=str)
def test_runs_that_need_not_agree(changed):
    assert agreeing([BASE, BASE | changed]) == []


def test_dropout_depends_on_the_ranks():
    dropout = BASE | {"dropout": 0.1}
    assert agreeing([dropout, dropout | {"implementation": "torch"}]) == [[0, 1]]
    assert agreeing([dropout, dropout | {"world_size": 4}]) == []


def test_runs_without_facts_need_not_agree():
    assert agreeing([{}, {}]) == []
