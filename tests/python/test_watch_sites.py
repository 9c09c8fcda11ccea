# SPDX-License-Identifier: Apache-2.0
"""Watch: the line that allocates what leaks, and who holds it. Each program is a file in a process of its own; the line
that is right has `# site` behind it."""
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

LOOP = """
import json, os, time
import plimsoll

def tell(watch):
    verdict = watch.verdict()
    print(json.dumps(dict(kind=verdict.kind, owner=verdict.owner, bytes_per_step=verdict.bytes_per_step,
                          site=verdict.site, sites=verdict.sites, holder=verdict.holder, text=str(verdict),
                          seconds_left=verdict.seconds_left, advice=verdict.advice, steps=watch.steps,
                          collect_seconds=watch.collect_seconds, sampling=watch._search.sampling)), flush=True)

def steps(watch, at_least=250, most=15000):
    # To ask for a verdict at once would end a search that has just begun. Where malloc() is slow it is asked rarely, and
    # windows are long.
    while watch.steps < at_least or (watch.steps < most and (watch.searching or watch.verdict(wait=False).kind == "too short")):
        yield watch.steps
        time.sleep(0.004)
        watch.step()
    tell(watch)
"""


@pytest.fixture
def played(tmp_path):
    def play(program: str) -> dict:
        path = tmp_path / "program.py"
        path.write_text(LOOP + textwrap.dedent(program), encoding="utf-8")
        done = subprocess.run([sys.executable, path], text=True, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        marked = [number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
                  if re.search(r"# site\b", line)]
        told["right"] = [f"{path}:{number}" for number in marked]
        return told

    return play


def test_a_list_of_a_module_and_the_line_that_fills_it(played):
    told = played("""
        kept = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                kept.append(bytearray(200_000))  # site
    """)
    assert told["kind"] == "leak" and told["owner"] == "native", told["text"]
    assert told["site"] in told["right"] and told["holder"] == "list `kept` in module __main__", told["text"]
    assert told["sites"][0][0] == told["site"] and told["sites"][0][1] > 5_000_000
    assert told["bytes_per_step"] == pytest.approx(200_000, rel=0.02)
    assert f"allocated at {told['site']}, held by list `kept` in module __main__" in told["text"]
    assert "list `kept`" in told["advice"][0] and told["seconds_left"] > 0
    assert not told["sampling"]  # There is an answer: nothing is hooked any more.


def test_small_objects_in_an_attribute(played):
    told = played("""
        class Trainer:
            def __init__(self):
                self.history = []

            def step(self, step):
                self.history.append({k: float(k + step) for k in range(2000)})  # site

        def main():
            trainer = Trainer()
            with plimsoll.Watch() as watch:
                for step in steps(watch):
                    trainer.step(step)

        main()
    """)
    assert told["kind"] == "leak", told["text"]
    assert told["site"] in told["right"], told["text"]
    assert told["holder"] == "attribute `history` of Trainer", told["text"]


def test_local_variables_closures_and_caches(played):
    told = played("""
        def main():
            kept = {}
            with plimsoll.Watch() as watch:
                for step in steps(watch):
                    kept[step] = b"1" * 150_000 + b"2"  # site
        main()
    """)
    assert told["site"] in told["right"] and told["holder"] == "dict `kept` in main()", told["text"]
    told = played("""
        def keeper():
            seen = []
            def keep(one):
                seen.append(one)
            return keep
        keep = keeper()
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                keep(bytearray(150_000))  # site
    """)
    assert told["site"] in told["right"] and told["holder"].endswith("closure of keeper.<locals>.keep"), told["text"]
    told = played("""
        import functools
        import numpy as np
        @functools.lru_cache(maxsize=None)
        def mask(step):
            return np.ones(20_000)  # site
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                mask(step)
    """)
    assert told["site"] in told["right"] and told["holder"] == "functools.lru_cache of mask", told["text"]


def test_an_exception_and_a_thread_local(played):
    told = played("""
        failures = []
        def work(step):
            batch = bytearray(150_000)  # site
            raise ValueError(step)
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                try:
                    work(step)
                except ValueError as error:
                    failures.append(error)
    """)
    assert told["site"] in told["right"], told["text"]
    assert told["holder"] == "list `failures` in module __main__ (exception traceback)"
    told = played("""
        import threading
        local = threading.local()
        local.kept = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                local.kept.append(bytearray(150_000))  # site
    """)
    assert told["site"] in told["right"] and told["holder"].endswith("(thread-local)"), told["text"]


def test_a_program_may_end_while_its_memory_is_trimmed():
    """Half of a GiB is in the middle of a heap: to give it back takes longer than to end."""
    program = """
import ctypes
import plimsoll
from plimsoll import _core
from plimsoll.watch import _search

heap = ctypes.CDLL(None)
heap.malloc.restype, heap.malloc.argtypes, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [heap.malloc(20_000) for _ in range(50_000)]
for block in blocks:
    ctypes.memset(block, 1, 20_000)
for block in blocks[::2]:
    heap.free(block)
_search.Search(_core.Watch(25.0), 25)._trim()
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_tensors_hooks_and_graphs(played):
    pytest.importorskip("torch")
    told = played("""
        import torch
        torch.set_num_threads(1)
        net = torch.nn.Linear(128, 256)
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                net.register_forward_hook(lambda module, taken, given, kept=[]: (kept or kept.append(given.detach())) and None)
                if step % 50 == 0:
                    net._forward_hooks.popitem()
                net(torch.randn(256, 128))  # site
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["holder"] == "attribute `_forward_hooks` of Linear", told["text"]
    told = played("""
        import torch
        torch.set_num_threads(1)
        net = torch.nn.Linear(256, 256)
        losses = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                batch = torch.randn(128, 256)  # site
                losses.append((net(batch) - batch).pow(2).mean())  # site
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["holder"] == "autograd graph of list `losses` in module __main__", told["text"]


def test_tensors_of_a_governor(played):
    pytest.importorskip("torch")
    told = played("""
        import torch
        features = {"train": []}
        with plimsoll.Governor("4GiB"), plimsoll.Watch() as watch:
            for step in steps(watch):
                features["train"].append(torch.randn(128, 256))  # site
    """)
    assert told["kind"] == "leak" and told["owner"] == "tensors", told["text"]
    assert told["site"] in told["right"] and told["holder"] == "dict `features` in module __main__", told["text"]


def test_a_program_in_a_folder_that_is_no_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "program.py").write_text(LOOP + textwrap.dedent("""
        kept = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                kept.append(bytearray(200_000))
    """))
    done = subprocess.run([sys.executable, folder / "program.py"], text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "/caf?/program.py:" in told["site"] and told["holder"] == "list `kept` in module __main__", told["text"]


def test_garbage_is_no_leak_and_is_collected_once(played):
    told = played("""
        import gc
        gc.disable()
        class Node:
            pass
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                node = Node()
                node.itself, node.data = node, bytearray(200_000)  # site
    """)
    assert told["kind"] == "uncollected garbage", told["text"]
    assert told["site"] in told["right"] and told["collect_seconds"] > 0, told["text"]
    assert "gc.collect()" in told["advice"][0]


def test_garbage_in_pythons_arenas_is_no_leak(played):
    told = played("""
        import gc
        gc.disable()
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                for _ in range(300):
                    circle = [float(k) for k in range(30)]  # site
                    circle.append(circle)
    """)
    assert told["owner"] == "python" and told["kind"] == "uncollected garbage", told["text"]


def test_what_has_a_holder_needs_no_collection(played):
    told = played("""
        import gc
        gc.disable()
        kept = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                kept.append(bytearray(200_000))  # site
    """)
    assert told["kind"] == "leak" and told["holder"] and told["collect_seconds"] is None, told["text"]


WORKERS = """
    import multiprocessing, sys

    class Items:
        def __init__(self):
            self.kept = {}

        def make(self, index):
            self.kept[index] = bytearray(200_000)  # site

    def work(items, asked, made):
        while (index := asked.get()) is not None:
            items.make(index)
            made.put(index)

    def main():
        context = multiprocessing.get_context(METHOD)
        asked, made = context.Queue(), context.Queue()
        with plimsoll.Watch() as watch:
            workers = [context.Process(target=work, args=(Items(), asked, made)) for _ in range(2)]
            for worker in workers:
                worker.start()
            for step in steps(watch):
                asked.put(step)
                made.get()
                time.sleep(0.03)  # In all ten seconds: workers answer four times a second.
            for worker in workers:
                asked.put(None)
            for worker in workers:
                worker.join()

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_say_their_line_and_their_holder(played, method):
    told = played(WORKERS.replace("METHOD", repr(method)))
    assert told["kind"] == "leak" and told["owner"] == "children", told["text"]
    assert told["site"] in told["right"] and told["holder"] == "attribute `kept` of Items", told["text"]
    assert told["bytes_per_step"] == pytest.approx(200_000, rel=0.3)


def test_workers_that_are_not_asked_sample_nothing_and_end_with_their_parent(played):
    told = played("""
        import multiprocessing, signal

        def work(told):
            import threading
            time.sleep(0.5)
            told.put([thread.name for thread in threading.enumerate()])

        context = multiprocessing.get_context("fork")
        told = context.Queue()
        with plimsoll.Watch() as watch:
            worker = context.Process(target=work, args=(told,))
            worker.start()
            assert "plimsoll-watch" in told.get()
            worker.join()
            assert worker.exitcode == 0
            for step in steps(watch):
                pass
    """)
    assert told["kind"] != "leak" and not told["sampling"]


def test_one_large_table_is_not_the_line_of_a_leak(played):
    told = played("""
        kept, table = [], None
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                kept.append(bytearray(300_000))  # site
                if step == 130:
                    table = bytearray(25_000_000)
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["holder"] == "list `kept` in module __main__", told["text"]


def test_all_quiet_samples_nothing(played):
    told = played("""
        cache = {}
        begun = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                cache[step % 20] = bytearray(100_000)
                begun.append(watch._search.sampling)
            assert not any(begun), begun.index(True)
    """)
    assert told["kind"] != "leak" and told["collect_seconds"] is None, told["text"]


def test_shared_memory_that_is_kept(played):
    told = played("""
        import mmap
        buffers = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                buffers.append(mmap.mmap(-1, 262_144))  # site
                buffers[-1].write(b"1" * 262_144)
    """)
    assert told["kind"] == "leak" and told["owner"] == "shared", told["text"]
    assert told["site"] in told["right"] and told["holder"] == "list `buffers` in module __main__", told["text"]


def test_batches_of_workers_that_are_kept_and_never_touched(played):
    """Shared memory that is resident nowhere any more. A look at three processes that share takes 20 ms."""
    told = played("""
        import torch

        class Items(torch.utils.data.Dataset):
            def __len__(self):
                return 1_000_000

            def __getitem__(self, index):
                return torch.full((20_000,), float(index)), index

        def main():
            labels, until = {}, time.monotonic() + 120
            with plimsoll.Watch() as watch:
                batches = iter(torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2))
                # At first workers may grow as fast: they copy what they share with this process when either writes.
                while not ((found := watch.verdict(wait=False)).owner == "shared" and found.site) and time.monotonic() < until:
                    for _ in range(25):
                        pixels, index = next(batches)  # site
                        labels[watch.steps] = (pixels[:, :1], index)
                        time.sleep(0.03)
                        watch.step()
                tell(watch)

        main()
    """)
    assert told["kind"] == "leak" and told["owner"] == "shared", told["text"]
    assert told["site"] in told["right"] and told["holder"] == "dict `labels` in main()", told["text"]


def test_m2_a_leak_of_100_kb_a_step_is_found_within_300_steps_of_the_warm_up(played):
    told = played("""
        cache, kept = {}, []
        with plimsoll.Watch() as watch:
            for step in steps(watch, at_least=350):
                cache.setdefault(min(step, 50), bytearray(1_000_000))  # 50 MB of warm-up.
                if step >= 50:
                    kept.append(bytearray(100_000))  # site
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["bytes_per_step"] == pytest.approx(100_000, rel=0.05)


def test_a_program_without_torch(played):
    told = played("""
        import sys
        sys.modules["torch"] = None
        kept = []
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                kept.append(bytearray(200_000))  # site
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["holder"] == "list `kept` in module __main__", told["text"]


def test_s15_create_graph_is_held_by_nobody_in_python(played):
    """Each parameter and its gradient hold each other in C++; the newest loss, which a variable has, keeps none of them."""
    told = played("""
        import warnings
        import torch
        warnings.simplefilter("ignore")

        def main():
            log = []
            with plimsoll.Watch() as watch:
                for step in steps(watch):
                    net = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))  # site
                    loss = net(torch.randn(32, 128)).square().mean()  # site
                    loss.backward(create_graph=True)  # site
                    log.append(loss.item())
        main()
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["holder"] == "nobody in Python: create_graph", told["text"]
    assert "torch.autograd.grad" in told["advice"][0] and "main" not in " ".join(told["advice"])


def test_s15_circles_with_graphs_are_garbage_and_nobodys(played):
    told = played("""
        import gc
        import torch
        gc.disable()

        class Turn:
            def __init__(self, net):
                self.out, self.own = net(torch.randn(100, 500)).tanh(), self

        def main():
            net = torch.nn.Linear(500, 500)
            with plimsoll.Watch() as watch:
                for step in steps(watch):
                    turn = Turn(net)
                    turn.out.sum().backward(retain_graph=True)
        main()
    """)
    assert told["kind"] == "uncollected garbage" and told["holder"] == "", told["text"]


def test_s15_variables_of_a_function_that_has_ended_hold_nothing():
    from plimsoll.watch._holders import Roots

    roots = Roots(skipped=[])

    def ends():
        kept = [bytearray(1000)]
        roots.begin()
        mine = next(one for one in roots.first if isinstance(one, dict) and one.get("kept") is kept)
        return mine, roots.name_of_locals(mine)

    mine, while_it_runs = ends()
    assert while_it_runs == "ends" and roots.name_of_locals(mine) == ""


@pytest.mark.parametrize(("begin", "add", "name"), [
    ("total = 0.0", "total = total + loss", "`total` in main()"),
    ("meter = Meter()", "meter.sum += loss", "`meter.sum` in main()"),
    ("stats = {'loss': 0.0}", "stats['loss'] += loss", "`stats['loss']` in main()"),
    ("trainer = Meter(); trainer.meter = Meter()", "trainer.meter.sum = trainer.meter.sum + loss", "`trainer.meter.sum` in main()"),
    ("global everything; everything = 0.0", "everything = everything + loss", "`everything` in module __main__"),
    ("sums = [0.0]", "sums[0] = sums[0] + loss", "`sums[0]` in main()"),
])
def test_s16_a_running_sum_is_named_by_its_variable(played, begin, add, name):
    told = played(f"""
        import torch

        class Meter:
            def __init__(self):
                self.sum = 0.0

        def main():
            {begin}
            net = torch.nn.Linear(500, 100)
            with plimsoll.Watch() as watch:
                for step in steps(watch):
                    loss = net(torch.randn(100, 500)).tanh().mean()  # site
                    {add}
        main()
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
    assert told["holder"] == f"autograd graph of Tensor {name}", told["text"]
    assert any("loss.item()" in line for line in told["advice"]), told["advice"]


def test_s50_caches_of_the_standard_library_are_nobodys(played):
    """They grow beside what leaks, which shows in no object: blocks that ctypes allocates."""
    told = played("""
        import ctypes, linecache, re
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        with plimsoll.Watch() as watch:
            for step in steps(watch):
                linecache.cache[f"<cell {step}>"] = (100, None, ["text"], f"<cell {step}>")
                re.compile(f"step {step}")
                ctypes.memset(libc.malloc(200_000), 1, 200_000)  # site
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"] and told["holder"] == "", told["text"]


def test_s50_the_line_is_the_foreign_call_not_its_caller(played):
    told = played("""
        import ctypes
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]

        def opened(size):
            handle = libc.malloc(size)  # site
            return ctypes.memset(handle, 1, size)  # site

        def made():
            values = [k * k for k in range(50)]
            return opened(200_000)

        def main():
            with plimsoll.Watch() as watch:
                for step in steps(watch):
                    made()
        main()
    """)
    assert told["kind"] == "leak" and told["site"] in told["right"], told["text"]
