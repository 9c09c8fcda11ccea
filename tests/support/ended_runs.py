# SPDX-License-Identifier: Apache-2.0
"""A run around a loop of one's own, which ends as its arguments say: boom, refuse, leak (and at once), slow."""
import os
import subprocess
import sys

# A loop of one's own whose data set keeps what it decodes, in a worker where there is one.
RUN = """
import os, sys, time
import torch
import plimsoll

class Data(torch.utils.data.Dataset):
    kept = []
    def __len__(self): return 4000
    def __getitem__(self, at):
        if "slow" in sys.argv:
            time.sleep(0.01)
            self.kept.append(torch.ones(1 << 18))  # 1 MiB
        elif "leak" in sys.argv:
            time.sleep(0.006)
            if len(self.kept) >= 300: time.sleep(1.5)
            self.kept.append(torch.ones(1 << (18 if len(self.kept) < 300 else 29)))  # 1 MiB; then 2 GiB
        if "boom" in sys.argv and at > 1: raise ValueError("the classroom is full: OOM")
        time.sleep(0.004)
        return torch.ones(8)

with plimsoll.Run(sys.argv[1], memory_limit=sys.argv[2], seed=1, foreign_bytes="96MiB") as run:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Data(), batch_size=4, workers=int(sys.argv[3]))
    for batch in run.steps(data, epochs=1, commit_every_steps=5, progress=False):
        with run.phase("decode"):
            run.step(lambda x: model(x).mean(), batch)
        if "refuse" in sys.argv and run.steps_made == 6:
            torch.ones(1 << 34)
        if run.steps_made == int(os.environ.get("STEPS", -1)):
            break
        print(run.steps_made, flush=True)
"""


def python_run(folder, limit, workers, *words, **environment):
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), limit, str(workers), *words], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment})
