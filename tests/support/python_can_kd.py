# SPDX-License-Identifier: Apache-2.0
"""The recipe can-kd: sizes of small models, and a graph set.

CAN_KD_DIES_AT=N ends the process with kill -9 as step N is told to events.jsonl, before it is counted.
"""
import json
import os
import signal

import plimsoll

from tests.support.can_traffic import write_traffic

NAME = "can-kd"
WINDOW = 20
SIZES = {"teacher_vgae_hidden_dims": "32,16,8", "teacher_vgae_heads": 2, "teacher_vgae_embedding_dim": 8, "teacher_gat_hidden": 8,
         "teacher_gat_layers": 2, "teacher_gat_heads": 4, "teacher_gat_embedding_dim": 8, "teacher_gat_fc_layers": 2,
         "student_vgae_hidden_dims": "16,8,4", "student_vgae_heads": 1, "student_vgae_embedding_dim": 2, "student_gat_hidden": 4,
         "student_gat_layers": 2, "student_gat_heads": 3, "student_gat_embedding_dim": 3, "student_gat_fc_layers": 1}
SMALL = {**SIZES, "seed": 42, "max_epochs": 2, "batch_size": 64, "fusion_episodes": 20, "min_steps_per_epoch": 2, "compute_threads": 1,
         "memory_limit": "2GiB", "progress": False}

if "CAN_KD_DIES_AT" in os.environ:
    event = plimsoll.Run.event

    def kill(self, name, /, **values):
        if name == "step" and values["step"] == int(os.environ["CAN_KD_DIES_AT"]):
            self._life.end_writing()  # What was due is there.
            os.kill(os.getpid(), signal.SIGKILL)
        event(self, name, **values)

    plimsoll.Run.event = kill


def make_set(folder):
    """About 480 windows, of which the test file's are of a known vehicle and attack."""
    for name, seed, windows, block in [("train_01_attack_free__a.csv", 1, 160, 0), ("train_02_with_attacks__flood.csv", 2, 200, 5 * WINDOW),
                                       ("test_01_known_vehicle_known_attack__flood.csv", 3, 120, 5 * WINDOW)]:
        write_traffic(folder / name, seed, windows * WINDOW + 1, block)
    plimsoll.import_can(folder, folder / "set", window=WINDOW, stride=WINDOW)
    return folder / "set"


def events(run, name):
    """Events of one kind that a run left."""
    return [one for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == name]
