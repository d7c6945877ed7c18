"""charts/differences.py: the names of runs, what differs between them, and which should have the same losses."""

from charts.differences import differences, in_common, names

BASE = {
    **{"out_dir": "out", "dataset": "d", "batch_size": 4, "gradient_accumulation_steps": 2, "dropout": 0.0, "seed": 1},
    **{"learning_rate": 0.001, "n_layer": 2, "use_zero1": True, "zero1_impl": "sharded", "shard_gradients": False},
    **{"param_dtype": "float32", "max_iters": 100, "implementation": "sharded", "world_size": 2, "micro_steps": 1},
    **{"git_commit": "abc", "parameters": 800_000, "state": "ended"},
}
ADAMW = BASE | {"implementation": "adamw", "use_zero1": False}


def named(*facts):
    return names(facts, [f"runs/x{place}" for place in range(len(facts))])


def test_a_name_is_what_differs():
    assert named(BASE, ADAMW) == ["sharded", "adamw"]
    assert named(BASE | {"learning_rate": 3e-4}, BASE) == ["learning_rate=0.0003", "learning_rate=0.001"]
    one_rank = ADAMW | {"dataset": "other", "world_size": 1, "micro_steps": 2, "out_dir": "b"}
    assert named(one_rank, ADAMW) == ["dataset=other, 1 rank", "dataset=d, 2 ranks"]
    flags = [f"sharded, shard_gradients={value}" for value in (False, True)]
    assert named(BASE, BASE | {"shard_gradients": True}, ADAMW) == [*flags, "adamw"]


def test_what_says_nothing_is_no_difference():
    same = {"out_dir": "y", "wandb_run_name": "b", "state": "killed", "init_from": "resume", "parts": []}
    assert differences([BASE, BASE | same]) == [{}, {}]
    older = {key: value for key, value in BASE.items() if key != "seed"}  # its run.json does not have all settings
    assert differences([BASE, older]) == [{}, {}]


def test_a_name_has_four_differences_and_the_table_all():
    first = BASE | {"sample_interval": 0}
    second = BASE | {"dataset": "e", "learning_rate": 0.1, "n_layer": 3, "batch_size": 5, "seed": 2, "sample_interval": 3}
    found = differences([first, second])[1]
    assert found == {
        key: f"{key}={second[key]}" for key in ("dataset", "sample_interval", "batch_size", "n_layer", "learning_rate", "seed")
    }
    assert named(first, second)[1] == "dataset=e, sample_interval=3, batch_size=5, n_layer=3", "in the order of train.py"


def test_runs_with_the_same_name_have_their_folder():
    assert named(BASE, BASE, ADAMW) == ["sharded, runs/x0", "sharded, runs/x1", "adamw"]
    assert named(BASE, BASE) == named(BASE, {}) == named({}, {}) == ["runs/x0", "runs/x1"]
    assert named(BASE) == ["runs/x0"]


def test_what_runs_have_in_common():
    assert in_common([BASE, ADAMW]) == ["d", "0.80M parameters", "2 ranks"]
    assert in_common([BASE]) == ["d", "0.80M parameters", "sharded", "2 ranks"]
    assert in_common([{}, BASE]) == []
