# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run with several losses and optimizers in a batch, with settings that were edited, and what run.step() copies and cuts."""
import json
import warnings

import pytest

import plimsoll

torch = pytest.importorskip("torch")


class Killed(Exception):
    pass


def events_of(path, name):
    return [event for event in map(json.loads, (path / "events.jsonl").read_text().splitlines()) if event["event"] == name]


# ---- Several losses ----


class Gan:
    """G and D by turns, D with two batches a step; a life ends by an exception in the body before the step `killed_in`."""

    def __init__(self, *, accumulate=1, refuse=None, calls=1):
        self.accumulate, self.refuse, self.calls = accumulate, refuse, calls
        self.moved = []

    def life(self, path, killed_in=-1):
        with plimsoll.Run(path, memory_limit="4GiB", seed=4) as run:
            self.run = run
            self.G = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            self.D = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
            G_opt = torch.optim.Adam(self.G.parameters(), 1e-2)
            D_opt = torch.optim.Adam(self.D.parameters(), 1e-2)
            run.track(G=self.G, D=self.D, G_opt=G_opt, D_opt=D_opt)

            def noise(x):
                return self.G(torch.randn(len(x), 4))

            def loss_of_D(x):
                return (self.D(x) - 1).square().mean() + self.D(noise(x).detach()).square().mean()

            def loss_of_G(x):
                if self.refuse is not None:
                    self.refuse(self)
                return (self.D(noise(x)) - 1).square().mean()

            data = run.loader([torch.tensor([k / 40, 1 - k / 40]) for k in range(40)], batch_size=5)
            for x in run.steps(data, epochs=2, commit_every_steps=3, progress=False):
                if run.steps_made + 1 == killed_in:
                    run._life.end_writing()
                    raise Killed
                before = self.bits()
                for _ in range(self.calls):
                    run.step(loss_of_D, x, optimizer=D_opt, loss="mean", accumulate=self.accumulate, weight=lambda x: len(x))
                between = self.bits()
                run.step(loss_of_G, x, optimizer=G_opt, clip_norm=1.0)
                self.moved.append([a != b for a, b in zip((*before, *between), (*between, *self.bits()))])
            return self.bits()

    def bits(self):
        return tuple(tuple(p.detach().flatten().tolist()) for net in (self.G, self.D) for p in [net[0].weight])


def test_s09_each_call_steps_its_own_optimizer_alone(tmp_path):
    gan = Gan()
    gan.life(tmp_path / "run")
    assert len(gan.moved) == 16 and all(moved == [False, True, True, False] for moved in gan.moved)


def test_s09_by_hand_it_is_the_same(tmp_path):
    """As the loop that torch's pages have for a GAN, from the same random numbers."""
    gan = Gan()
    made = gan.life(tmp_path / "run")
    with plimsoll.Run(tmp_path / "by hand", memory_limit="4GiB", seed=4) as run:
        G = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        D = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        G_opt, D_opt = torch.optim.Adam(G.parameters(), 1e-2), torch.optim.Adam(D.parameters(), 1e-2)
        run.track(G=G, D=D)
        data = run.loader([torch.tensor([k / 40, 1 - k / 40]) for k in range(40)], batch_size=5)
        for x in run.steps(data, epochs=2, progress=False):
            D_opt.zero_grad()
            ((D(x) - 1).square().mean() + D(G(torch.randn(len(x), 4)).detach()).square().mean()).backward()
            D_opt.step()
            G_opt.zero_grad()
            (D(G(torch.randn(len(x), 4))) - 1).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(G.parameters(), 1.0)
            G_opt.step()
    gan.G, gan.D = G, D
    assert gan.bits() == made


@pytest.mark.parametrize("accumulate", [1, 2])
def test_s09_killed_at_any_moment_a_gan_ends_in_the_same_bits(accumulate, tmp_path):
    undisturbed = Gan(accumulate=accumulate).life(tmp_path / "undisturbed")
    for step in (2, 5, 8, 15):
        with pytest.raises(Killed):
            Gan(accumulate=accumulate).life(tmp_path / "run", step)
    assert Gan(accumulate=accumulate).life(tmp_path / "run") == undisturbed


def test_s09_a_call_that_is_refused_and_made_again_changes_no_bit(tmp_path):
    undisturbed, told = Gan().life(tmp_path / "undisturbed"), []

    def refuse(gan):
        if len(told) < 3:
            told.append(1)
            if len(told) % 2:
                raise torch.OutOfMemoryError("refused")

    assert Gan(refuse=refuse).life(tmp_path / "run") == undisturbed and len(told) == 3


@pytest.mark.parametrize("calls", [1, 3])
def test_s09_a_call_that_fails_puts_back_those_before_it(calls, tmp_path):
    seen = []

    def refuse(gan):
        if gan.run.steps_made == 2:
            seen.append(gan.bits()[1])
            raise torch.OutOfMemoryError("refused")

    gan = Gan(refuse=refuse, calls=calls)
    with pytest.raises(plimsoll.BudgetExceeded):
        gan.life(tmp_path / "run")
    two = Gan(calls=calls)
    with pytest.raises(Killed):
        two.life(tmp_path / "other", 3)
    assert seen and seen[0] != two.bits()[1], "D has moved when G's call was refused"
    assert gan.bits() == two.bits() and not gan.run._steps.is_half_made


def test_s09_calls_that_share_their_optimizers_unnamed_are_refused(tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
        G, D = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
        og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
        run.track(G=G, D=D, og=og, od=od)
        data = [torch.randn(3, 4) for _ in range(4)]
        for x in run.steps(data, epochs=1, progress=False):
            run.step(lambda x: D(G(x)).mean(), x)  # One loss for both: as ever.
            with pytest.raises(ValueError, match=r"more than once in a batch.*og, od.*optimizer=og"):
                run.step(lambda x: D(G(x)).mean(), x)
            with pytest.raises(ValueError, match="optimizer="):
                run.step(lambda x: D(G(x)).mean(), x, optimizer=og)
            break
        for x in run.steps(data, epochs=1, progress=False):
            with pytest.raises(ValueError, match="is not tracked"):
                run.step(lambda x: D(G(x)).mean(), x, optimizer=torch.optim.SGD(G.parameters(), 0.1))
            break


# ---- Settings that were edited ----


def trained(path, *, accept=(), epochs=1, scheduled=False, **settings):
    """The learning rate of each step, and the optimizer's group at the end."""
    with plimsoll.Run(path, memory_limit="4GiB", seed=1, accept=accept) as run:
        net = torch.nn.Linear(4, 2)
        one = torch.optim.AdamW(net.parameters(), **{"lr": 0.1, **{k: v for k, v in settings.items() if k != "gamma"}})
        parts = {"schedule": torch.optim.lr_scheduler.ExponentialLR(one, settings.get("gamma", 0.5))} if scheduled else {}
        run.track(net=net, one=one, **parts)
        rates = []
        for x in run.steps([torch.ones(3, 4)] * 4, epochs=epochs, progress=False):
            rates.append(one.param_groups[0]["lr"])
            run.step(lambda x: net(x).square().mean(), x)
            for schedule in parts.values():
                schedule.step()
        return rates, {k: v for k, v in one.param_groups[0].items() if k != "params"}


def test_s10_a_setting_that_was_edited_is_told_with_both_values(tmp_path):
    path = tmp_path / "run"
    trained(path)
    with pytest.warns(RuntimeWarning, match=r"one\.lr was 0\.1 and is 0\.01; one\.weight_decay was 0\.01 and is 0\.2.*accept="):
        rates, group = trained(path, epochs=2, lr=0.01, weight_decay=0.2)
    assert rates == [0.1] * 4 and group["weight_decay"] == 0.01
    told = events_of(path, "setting")
    assert [(one["part"], one["name"], one["was"], one["is"], one["taken"]) for one in told] == [
        ("one", "lr", "0.1", "0.01", False), ("one", "weight_decay", "0.01", "0.2", False)]
    with pytest.warns(RuntimeWarning, match=r"one\.lr was 0\.1 and is 0\.01"):  # Until it is taken, or edited back.
        trained(path, epochs=3, lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(path, epochs=4)


@pytest.mark.parametrize("accept", [("lr", "betas"), ("one.lr", "one.betas")])
def test_s10_what_is_accepted_is_taken_and_recorded(accept, tmp_path):
    path = tmp_path / "run"
    trained(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates, group = trained(path, accept=accept, epochs=2, lr=0.01, betas=(0.8, 0.9))
        assert rates == [0.01] * 4 and group["betas"] == (0.8, 0.9)
        assert [one["taken"] for one in events_of(path, "setting")] == [True, True]
        assert trained(path, epochs=3, lr=0.01, betas=(0.8, 0.9))[0] == [0.01] * 4  # It is the run's own from now on.


def test_s10_a_learning_rate_that_is_scheduled_stays_as_far_along(tmp_path):
    path = tmp_path / "run"
    assert trained(path, scheduled=True)[0] == [0.1, 0.05, 0.025, 0.0125]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # The rate of the program is what it was, if not that of the commit.
        assert trained(path, scheduled=True, epochs=2)[0] == [0.1 / 2 ** k for k in range(4, 8)]
    with pytest.warns(RuntimeWarning, match=r"schedule\.gamma was 0\.5 and is 0\.25"):
        rates, group = trained(path, scheduled=True, epochs=3, lr=0.2, gamma=0.25, accept="lr")
    assert rates == [0.2 / 2 ** k for k in range(8, 12)] and group["initial_lr"] == 0.2
    rates, _ = trained(path, scheduled=True, epochs=4, lr=0.2, gamma=0.25, accept=["gamma"])
    assert rates == pytest.approx([0.2 / 2 ** 12 / 4 ** k for k in range(4)])


def test_s10_a_finished_run_says_that_it_is(tmp_path, capfd):
    trained(tmp_path / "run", epochs=2)
    capfd.readouterr()
    assert trained(tmp_path / "run", epochs=2)[0] == []
    said = capfd.readouterr().err
    assert "finished at step 8: of its 2 epochs none is left" in said and "goes on" not in said
    trained(tmp_path / "run", epochs=3)
    assert "goes on at step 8" in capfd.readouterr().err


# ---- What a step cuts and copies ----


def test_s13_the_refusal_names_the_arguments_that_cut_a_batch(tmp_path):
    def refused(net, **options):
        with plimsoll.Run(tmp_path / str(len(list(tmp_path.iterdir()))), memory_limit="4GiB") as run:
            one = torch.optim.SGD(net.parameters(), 0.1)
            run.track(net=net, one=one)

            def loss(x):
                if len(x) > 2:
                    raise torch.OutOfMemoryError("refused")
                return net(x).square().mean()

            for x in run.steps([torch.ones(8, 4)], progress=False):
                run.step(loss, x, **options)
            return run._steps._made[""][0].parts

    def norm():
        return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    with pytest.raises(plimsoll.BudgetExceeded, match='the argument loss="mean"'):
        refused(torch.nn.Linear(4, 2))
    with pytest.raises(plimsoll.BudgetExceeded, match='the argument loss="mean".*allow_batchnorm_microbatch=True'):
        refused(norm())
    assert refused(torch.nn.Linear(4, 2), loss="mean") == 4
    assert refused(norm(), loss="mean", allow_batchnorm_microbatch=True) == 4


def test_s13_the_call_of_the_tutorial_is_one_that_is_cut():
    import inspect
    import pathlib
    import re

    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "guide" / "tutorial.md").read_text("utf-8")
    call = re.search(r"run\.step\(loss_of, batch, (.*)\)  # 5", page)[1]
    given = eval(f"dict({call})")
    assert given["loss"] == "mean" and given["allow_batchnorm_microbatch"] and set(given) <= set(inspect.signature(plimsoll.Run.step).parameters)


def stepped(path, make, *, kill=-1, **options):
    with plimsoll.Run(path, memory_limit="4GiB", seed=2) as run:
        net = torch.nn.Linear(64, 64)
        one = make(net)
        run.track(net=net, one=one)
        for x in run.steps([torch.ones(2, 64)] * 6, commit_every_steps=2, progress=False):
            if run.steps_made + 1 == kill:
                run._life.end_writing()
                raise Killed
            run.step(lambda x: net(x).square().mean(), x, **options)
        return one.param_groups[0].get("fused"), net.weight.detach().clone()


def test_s14_a_new_run_steps_fused_where_that_needs_no_copy(tmp_path):
    path = tmp_path / "run"
    fused, weight = stepped(path, lambda net: torch.optim.AdamW(net.parameters()))
    assert fused is True and [one["copied_bytes"] for one in events_of(path, "optimizer")] == [0]
    with pytest.raises(Killed):
        stepped(tmp_path / "killed", lambda net: torch.optim.AdamW(net.parameters()), kill=5)
    again = stepped(tmp_path / "killed", lambda net: torch.optim.AdamW(net.parameters()))
    assert again[0] is True and torch.equal(again[1], weight)
    assert torch.equal(stepped(tmp_path / "said", lambda net: torch.optim.AdamW(net.parameters(), fused=True))[1], weight)


def test_s14_what_is_copied_is_told_with_its_bytes(tmp_path):
    path, numbers = tmp_path / "run", 64 * 64 + 64
    fused, _ = stepped(path, lambda net: torch.optim.AdamW(net.parameters(), fused=False))
    told = events_of(path, "optimizer")
    assert fused is False and [one["copied_bytes"] for one in told] == [3 * 4 * numbers] and "fused=True" in told[0]["message"]
    path = tmp_path / "groups"
    stepped(path, lambda net: torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.1))
    assert [one["copied_bytes"] for one in events_of(path, "optimizer")] == [4 * numbers]


def test_s14_an_optimizer_that_has_stepped_keeps_its_kernel(tmp_path):
    """As that of a run from before fused kernels were chosen."""
    def made(net, steps):
        one = torch.optim.AdamW(net.parameters())
        for _ in range(steps):
            net(torch.ones(2, 64)).square().mean().backward()
            one.step()
        return one

    assert stepped(tmp_path / "run", lambda net: made(net, 1))[0] is None
