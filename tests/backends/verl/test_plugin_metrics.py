"""A rollout batch's rewards get into verl's metrics, padding aside. The parts of verl that are called stand in."""

from types import SimpleNamespace

from opdctl.backends.verl.plugin.metrics import _log_rewards, batch_metrics

REPORTS = {
    "a-1_0_0": {"earned": 1.0, "accuracy": 1.0, "length": 4.0, "finished": 1.0},
    "a-1_1_0": {"earned": 1.0, "accuracy": 1.0, "length": 6.0, "finished": 1.0},
    "b-2_0_0": {"earned": -1.0, "accuracy": 0.0, "length": 8.0, "finished": 0.0},
    "b-2_1_0": {"earned": 0.0, "accuracy": 0.0, "length": 2.0, "finished": 1.0},
    "padding": {"earned": 9.0, "accuracy": 9.0, "length": 9.0, "finished": 9.0},
}


class Queue:
    """verl's TransferQueue: fields by key."""

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert (partition_id, select_fields) == ("train", ["extra_fields"])
        fields = [{"reward_extra_info": REPORTS[key]} for key in keys]
        return {"extra_fields": SimpleNamespace(tolist=lambda: fields)}


class PPOTrainer:
    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        metrics["critic/score/mean"] = global_steps


def test_a_batch_is_reported_beside_verls_own_metrics():
    _log_rewards(SimpleNamespace(PPOTrainer=PPOTrainer, tq=Queue()))
    tags = [{"is_padding": key == "padding"} for key in REPORTS]
    batch = SimpleNamespace(keys=list(REPORTS), tags=tags, partition_id="train")
    metrics = {}
    PPOTrainer()._compute_metrics(batch, metrics, {}, global_steps=3, epoch=0)
    assert metrics == {
        "critic/score/mean": 3,
        "opdctl/reward": 0.25,
        "opdctl/accuracy": 0.5,
        "opdctl/length": 5.0,
        "opdctl/truncated": 0.25,
        "opdctl/tied_groups": 0.5,
    }


def test_what_an_effort_budget_did_is_reported_where_there_is_one():
    reported = [{"earned": 0.0, "finished": 1.0, "tau": 1.5, "budget": b, "over_budget": float(b < 3)} for b in (2, 4)]
    found = batch_metrics(reported, ["a", "b"])
    assert (found["tau"], found["budget"], found["over_budget"]) == (1.5, 3, 0.5)
