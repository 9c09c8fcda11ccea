# SPDX-License-Identifier: Apache-2.0
"""`plimsoll plan … --device`: the batch fits the device's limit too, and its refusals name the option."""
import functools
import json
import math
import re
import subprocess

import pytest

from tests.support.can_traffic import write_traffic
from tests.support.named_limits import until_it_does

from test_cli import assert_refused, call, trains  # noqa: F401  Fixtures.
from test_plan_cosir import planned_in_python

MIB = 1 << 20
WINDOW = 20


@pytest.fixture(scope="module")
def pairs(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("device") / "data"
    subprocess.run([program, "synth", "cosir", "--rows", "20000", "--out", folder, "--seed", "0"],
                   check=True, capture_output=True)
    return ["cosir", "--data", folder, "--foreign-bytes", "64MiB", "--eval-pairs", "200"]


@pytest.fixture(scope="module")
def graphs(program, tmp_path_factory):
    bus = tmp_path_factory.mktemp("device_bus")
    write_traffic(bus / "train_01__flood.csv", 4, 1000 * WINDOW + 1, 5 * WINDOW)
    subprocess.run([program, "import", "can", bus, "--out", bus / "set", "--window", str(WINDOW),
                    "--stride", str(WINDOW)], check=True, capture_output=True)
    return ["can-kd", "--data", bus / "set", "--config", "small", "--stage", "normal",
            "--student-gat-hidden", "16", "--student-gat-heads", "8",
            "--gradient-checkpointing", "false", "--compute-threads", "2", "--scoring-chunk", "64"]


@pytest.fixture(scope="module")
def plan(trains, call):
    """Plans by the program. What is asked for again is planned once."""
    @functools.cache
    def planned(*words):
        done = call("plan", *words, "--json")
        assert done.status == 0, done.err
        return json.loads(done.out.splitlines()[-1])
    return lambda recipe, *options, limit="1GiB": planned(*recipe, "--memory-limit", limit, *options)


def simulated(limit):
    return ["--device", "simulated", "--device-memory-limit", limit]


def enough_after(done):
    """The limit that a refusal names."""
    assert_refused(done, 1, "--device-memory-limit", "would do")
    return re.search(r"--device-memory-limit (\d+)MiB would do", done.err)[1] + "MiB"


def fits(device):
    return (0 < device["static_bytes"] <= device["reserved_bytes"] <= device["bound_bytes"]
            <= device["limit_bytes"] and 0 < device["allocated_bytes"] <= device["reserved_bytes"]
            and device["reserved_bytes"] % (2 * MIB) == 0)


def test_a_smaller_device_limit_gives_a_smaller_batch_of_pairs(plan, pairs):
    host = plan(pairs)
    assert "device" not in host and "pinned_bytes" not in host
    assert plan(pairs, "--device", "cpu")["batch_size"] == host["batch_size"]
    found = [plan(pairs, *simulated(limit)) for limit in ("40MiB", "70MiB", "64GiB")]
    sizes = [one["batch_size"] for one in found]
    assert sizes[0] < sizes[1] < sizes[2] == host["batch_size"]
    for one in found:
        assert one["label"] == "bounded"  # No step has run there.
        assert one["device"]["name"] == "simulated" and one["device"]["steady"]
        assert fits(one["device"])
    assert "--device-memory-limit" in found[0]["advice"]
    assert "--device-memory-limit" not in found[2]["advice"]


def test_the_transfer_buffer_is_two_batches_of_the_hosts_limit(plan, call, pairs):
    small, large = (plan(pairs, *simulated(limit)) for limit in ("40MiB", "70MiB"))
    # The ring holds batches, and two more are pinned.
    slots = {one["queue_bytes"] * 2 / one["pinned_bytes"] for one in (small, large)}
    assert len(slots) == 1 and slots.pop() in range(2, 64)
    assert small["pinned_bytes"] < large["pinned_bytes"]
    # Where the host holds the batch, what is pinned is not there for its step.
    refused = call("plan", *pairs, "--memory-limit", "8MiB")
    tight = f"{math.ceil(float(re.search(r'([0-9.]+) MiB are held before', refused.err)[1])) + 64 + 115}MiB"
    without, pinned = plan(pairs, limit=tight), plan(pairs, *simulated("64GiB"), limit=tight)
    assert pinned["batch_size"] < without["batch_size"]


def test_the_limit_that_a_refusal_names_is_enough(trains, call, plan, pairs):
    done = call("plan", *pairs, "--memory-limit", "1GiB", *simulated("1MiB"))
    limit = enough_after(done)
    assert fits(plan(pairs, *simulated(limit))["device"])


def test_the_process_limit_that_a_refusal_names_counts_what_is_pinned(trains, call, plan, pairs):
    words = ["plan", *pairs, *simulated("64GiB"), "--json", "--memory-limit"]
    _, done = until_it_does(lambda limit: call(*words, f"{limit}MiB"), 150, 8)
    assert json.loads(done.out.splitlines()[-1])["pinned_bytes"] > 0


def test_the_table_has_the_devices_lines(trains, call, pairs):
    done = call("plan", *pairs, "--memory-limit", "1GiB", *simulated("40MiB"))
    assert done.status == 0, done.err
    for words in ("simulated: ", " reserved, ", " allocated, ", " fragments; ", " of its 40.0 MiB with room", "  pinned "):
        assert words in done.out, done.out
    assert "simulated" not in call("plan", *pairs, "--memory-limit", "1GiB").out


def test_every_choice_that_is_weighed_fits_the_device(plan, pairs):
    found = plan(pairs, *simulated("60MiB"), "--choices", "--dim", "1024")
    free = plan(pairs, "--choices", "--dim", "1024")
    sizes = {choice["options"]: choice["batch_size"] for choice in found["choices"]}
    for choice in free["choices"]:
        assert sizes.get(choice["options"], 0) < choice["batch_size"]


def test_a_smaller_device_limit_gives_a_smaller_batch_of_graphs(trains, call, plan, graphs):
    host = plan(graphs)
    refused = call("plan", *graphs, "--memory-limit", "1GiB", *simulated("2MiB"))
    assert "_gat_normal: " in refused.err
    least = int(enough_after(refused).removesuffix("MiB"))
    found = [plan(graphs, *simulated(f"{limit}MiB")) for limit in (2 * least, 4 * least, 1 << 16)]
    sizes = [one["batch_size"] for one in found]
    assert sizes[0] < sizes[1] <= sizes[2] <= host["batch_size"]
    for one in found:
        for task in one["tasks"].values():
            assert fits(task["device"])
            assert task["label"] == "bounded"
    assert all("device" not in task for task in host["tasks"].values())
    done = call("plan", *graphs, "--model-size", "student", "--memory-limit", "1GiB", *simulated(f"{4 * least}MiB"))
    assert "simulated: " in done.out and " reserved, " in done.out


@pytest.mark.parametrize("options, words", [
    (["--device-memory-limit", "8GiB"], ["--device-memory-limit 8GiB: there is no device", "--device"]),
    (["--device", "simulated"], ["--device simulated", "--device-memory-limit"]),
    (["--device", "tpu"], ["--device tpu: no such device", "cuda"]),
    (simulated("plenty"), ["--device-memory-limit", "plenty"]),
    (simulated("0"), ["--device-memory-limit"]),
])
@pytest.mark.parametrize("recipe", ["cosir", "can-kd"])
def test_wrong_devices_are_refused_naming_the_option(trains, call, tmp_path, recipe, options, words):
    # Before the data is looked for.
    assert_refused(call("plan", recipe, "--data", tmp_path, *options), 2, *words)


def test_cuda_without_cuda_says_what_to_install(trains, call, pairs):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert_refused(call("plan", *pairs, "--device", "cuda"), 1, "--device cuda: this torch (",
                   "has no CUDA", "--device simulated")


def test_python_plans_for_a_device_too(trains, plan, pairs):
    plimsoll = pytest.importorskip("plimsoll")
    pytest.importorskip("torch")
    data = pairs[2]
    options = {"data": data, "memory_limit": "1GiB", "eval_pairs": 200}
    told, without = planned_in_python({**options, "device": "simulated", "device_memory_limit": "70MiB"}, options)
    assert told["batch_size"] == plan(pairs, *simulated("70MiB"))["batch_size"]
    assert fits(told["device"]) and told["pinned_bytes"] > 0
    assert "device" not in without
    with pytest.raises(ValueError, match="--device-memory-limit"):
        plimsoll.plan("cosir", data=data, device="simulated")
