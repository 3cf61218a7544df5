"""Two stages on one machine keep their weights apart."""

import tempfile

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender


def test_both_ends_of_the_weight_transfer_meet_in_the_stages_own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handle = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    sender = BucketedWeightSender(zmq_handle=handle)
    receiver = BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"))
    assert (
        sender.zmq_handle == receiver.zmq_handle == f"ipc://{tmp_path}/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    )
