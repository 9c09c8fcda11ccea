# SPDX-License-Identifier: Apache-2.0
"""Training of `cosir`, from an empty folder to a trained model: read Training.whole() first, then what it calls, top to bottom.

docs/recipes/cosir.md, section 3, says what is trained by which optimizer.

Threads: the thread that trains.   Memory: a step's tensors, beside data, model and conditions.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import torch

from ...memory._memory import format_bytes
from ...rows._embedding import EmbeddingStore
from ...run._runs import status
from ...training._step import TrainingStep
from .. import Told, committed, limited
from ._evaluate import FINAL_ANGLES, Evaluation, Recall, reader, text_of
from ._model import Model, Shape
from ._pairs import Pairs
from ._phase2 import Classifier, Phase2
from ._plan import check_room, planned
from ._settings import cosine_scale, loss_of, optimizer_of, table_init, table_optimizer, table_place

if TYPE_CHECKING:
    from ...run._run import Run
    from . import Options

CONDITIONS = "conditions"  # The table of a run.
_REQUEST_ROWS = 256
_CHECKPOINT_BYTES = 1 << 20  # Of a checkpoint, beside its tensors.


class Training:
    """The training in one start of a run: a resumed run makes another."""

    def __init__(self, run: Run, options: Options) -> None:
        """Makes or restores model, optimizers and conditions. Errors: ValueError naming the option; BudgetExceeded; OSError."""
        self.run, self.options, self.device = run, options, options.device_name()
        self.pairs = pairs = Pairs(run.governor, options, self.device)
        self.model = Model(Shape.of(options, *pairs.widths), options.seed).to(self.device)
        self.optimizer = optimizer_of(self.model, options)
        # What must be known again. loss_sum and loss_steps are of the epoch so far.
        self.notes: dict[str, Any] = {"data": pairs.fingerprint, "batch_size": options.batch_size, "epoch": 0, "loss_sum": 0.0, "loss_steps": 0,
                                      "rows_skipped": 0, "recall_before": ""}
        run.track(model=self.model, optimizer=self.optimizer, notes=self.notes)
        if options.phase2_epochs:
            self.classifier = Classifier(self.model.shape.dim, options.seed).to(self.device)
            self.labeller = torch.optim.AdamW(self.classifier.parameters(), lr=options.phase2_lr, weight_decay=options.weight_decay, fused=True)
            run.track(classifier=self.classifier, labeller=self.labeller)
        must_be_noted(pairs, self.notes)
        if not self.notes["batch_size"]:
            if run.group.crew is not None:
                raise ValueError(f"batch_size = auto is planned for one process, and these are {run.group.crew.ranks.count} ranks; give batch_size "
                                 "a number")
            plan = planned(run.governor, options, pairs, self.model, self.optimizer)
            self.notes["batch_size"] = plan.batch_size
            run.event("planned", batch_size=plan.batch_size, label=plan.label, peak_bytes=plan.peak_bytes)
        self.batch_size: int = self.notes["batch_size"]
        check_room(run.governor, options, pairs, self.model.shape.dim, self.batch_size)
        self.conditions = run.embedding(
            CONDITIONS, rows=pairs.rows, ids=pairs.ids, dim=options.label_dim, dtype=options.label_dtype,
            optimizer=table_optimizer(options), init=table_init(options), batch_rows=max(self.batch_size, _REQUEST_ROWS),
            io_threads=options.io_threads, order_seed=pairs.order_seed, **table_place(options, pairs.rows, run.governor))
        if options.disk_limit:
            self._check_disk()
        self.loss = loss_of(self.model, options, run.group)
        pairs.begin(self.batch_size, self.conditions.store)
        self._last_loss = math.nan

    def _check_disk(self) -> None:
        """Checks that rows and checkpoints stay below the disk limit whatever the run does. Errors: ValueError."""
        trained = [*self.model.parameters(), *(self.classifier.parameters() if self.options.phase2_epochs else ())]
        weights = sum(one.nbytes for one in trained)
        each = 3 * weights + _CHECKPOINT_BYTES  # AdamW has two numbers for each weight.
        needed, limit = self.conditions.store.plan().disk_cap_bytes + (self.options.keep_checkpoints + 1) * each, self.run.governor.disk_limit_bytes
        if needed > limit:
            raise ValueError(f"the run {self.run.path}, its rows and its checkpoints, may come to fill {format_bytes(needed)} of disk, and the disk "
                             f"limit is {format_bytes(limit)}; raise the disk limit (--disk-limit), or keep fewer checkpoints (--keep-checkpoints)")

    def whole(self) -> dict[str, Any]:
        """Trains to the end, and returns the entries for the run's summary."""
        run, options, notes = self.run, self.options, self.notes
        if options.phase2_epochs and not run.steps_made:
            self._admit_phase2()
        if not notes["recall_before"]:
            before = self._evaluate("before training", FINAL_ANGLES, run.steps_made)
            notes["recall_before"] = json.dumps(before) if before else ""
        self._train()
        phase2 = self._train_phase2() if options.phase2_epochs else None
        recall: Recall | None = None
        accuracy: dict[str, Any] = {}
        if not run.stopped:
            recall = self._evaluate("after training", FINAL_ANGLES, run.steps_made)
            if phase2 is not None:
                accuracy = phase2.accuracy(self.pairs, options.eval_pairs)
                run.event("phase2", accuracy=json.dumps(accuracy))
        return {**self._told(), "recall": recall or {}, "recall_before": json.loads(notes["recall_before"] or "{}"), "phase2": accuracy,
                "state_sha256": self._digest()}

    def _train(self) -> None:
        """Makes the epochs of phase 1."""
        run, options, pairs, table = self.run, self.options, self.pairs, self.conditions.store
        steps, rates = options.epochs * len(pairs), (options.lr, options.projection_lr)
        for batch in run.steps(pairs, epochs=options.epochs, largest=pairs.first(min(self.batch_size, pairs.rows)),
                               cleanup_every_n_steps=options.cleanup_every_n_steps):
            scale = cosine_scale(run.steps_made, steps, options.lr)
            for group, rate in zip(self.optimizer.param_groups, rates):
                group["lr"] = rate * scale
            if options.label_schedule == "cosine":
                table.set_optimizer(dataclasses.replace(table.optimizer, lr=options.label_lr * scale))
            if len(batch[0]) < 2:
                self._made(batch, None)  # A lone row has no loss.
            else:
                self._made(batch, run.step(self._loss_of, batch, optimizer=self.optimizer), self.loss.terms)
            if pairs.ends_epoch:
                self._end_epoch(batch[-1])

    def _loss_of(self, image: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, groups: torch.Tensor, epoch: int) -> torch.Tensor:
        return self.loss(image, text, ids, groups, epoch, self.conditions(ids))

    def _admit_phase2(self) -> None:
        """Rehearses the largest step of phase 2, so that it is not refused after phase 1. Errors: BudgetExceeded."""
        options, trained = self.options, [one for one in self.model.parameters() if one.requires_grad]
        # Phase 2 begins beside the moments of phase 1. A run of two optimizers copies what a step writes, and keeps it until the batch is over.
        beside = [torch.zeros_like(one) for one in [*trained, *trained, *self.classifier.parameters()]]
        self.model.requires_grad_(False)
        try:
            phase2 = Phase2(self.model, self.classifier, options.temperature, options.seed, 1.0, self.device)
            step = TrainingStep(self.classifier, torch.optim.AdamW(self.classifier.parameters(), lr=0.0, fused=True))
            admitted = step.admit(self.pairs.first(min(self.batch_size, self.pairs.rows)), phase2.loss)
            self.run.event("rehearsed", phase=2, admitted_bytes=admitted)
        finally:
            del beside
            for one in trained:
                one.requires_grad_(True)

    def _train_phase2(self) -> Phase2:
        """Makes the epochs of phase 2, in which everything of phase 1 is frozen."""
        run, options, pairs = self.run, self.options, self.pairs
        self.model.requires_grad_(False)
        radius = self._evaluation().radius_quantile(0.5)
        phase2 = Phase2(self.model, self.classifier, options.temperature, options.seed, radius, self.device)
        for batch in run.steps(pairs, epochs=options.phase2_epochs, largest=pairs.first(min(self.batch_size, pairs.rows)),
                               cleanup_every_n_steps=options.cleanup_every_n_steps):
            self._made(batch, run.step(phase2.loss, batch, optimizer=self.labeller) if len(batch[0]) >= 2 else None)
            if pairs.ends_epoch:
                self._end_epoch(batch[-1])
        return phase2

    # ---- What is told ----

    def _made(self, batch: tuple[Any, ...], loss: float | None, terms: dict[str, Any] | None = None) -> None:
        """Notes a step. loss: None where its rows were skipped."""
        run, notes, rows = self.run, self.notes, len(batch[0])
        if self.pairs.begins_epoch:
            notes.update(loss_sum=0.0, loss_steps=0)
        notes["epoch"] = self.pairs.place[0]
        notes["rows_skipped"] += rows if loss is None else 0
        notes["loss_sum"] += loss or 0.0
        notes["loss_steps"] += loss is not None
        step, told = run.steps_made + 1, {"loss": loss or 0.0, "rows": rows, **{name: float(one) for name, one in (terms or {}).items()}}
        if step % self.options.metrics_every_n_steps == 0:
            run.log(**told)
        else:
            run.event("step", step=step, epoch=batch[-1], **told)

    def _end_epoch(self, epoch: int) -> None:
        run, options, step = self.run, self.options, self.run.steps_made + 1
        now = status(run.path)
        loss, hits = self._mean_loss(), float(self.conditions.store.stats()["hit_rate"])
        run.event("epoch", step=step, epoch=epoch, loss=loss, hit_rate=hits,
                  **{name: now[name] for name in ("rows_per_second", "resident_bytes", "leased_bytes")})
        run.scalars({"loss/epoch": loss, "rows/hit_rate": hits})
        every = options.eval_every_n_epochs
        if every and (epoch + 1) % every == 0 and epoch + 1 < options.epochs:
            self._evaluate(f"after epoch {epoch + 1}", options.oracle_angles, step)

    def _mean_loss(self) -> float:
        return self.notes["loss_sum"] / max(1, self.notes["loss_steps"])

    def _evaluation(self) -> Evaluation:
        return Evaluation(self.model, self.pairs, reader(self.conditions.store), batch_size=self.batch_size, eval_pairs=self.options.eval_pairs,
                          asked=lambda: self.run.stop_asked)

    def _evaluate(self, when: str, angles: int, step: int) -> Recall | None:
        """Evaluates; None where the run was asked to stop meanwhile."""
        run = self.run
        with run.phase("evaluate"):
            recall = self._evaluation().make(angles)
        if recall is not None:
            run.event("eval", step=step, when=when, recall=json.dumps(recall))
            run.scalars({f"eval/{kind}_{way}_{name}": recall[kind][way][name] for kind in ("raw", "oracle") for way in ("t2i", "i2t")
                         for name in ("r1", "r5", "r10", "mean_rank", "map")} | {"eval/train_mean_rank": recall["train_mean_rank"]})
        return recall

    def _told(self) -> dict[str, Any]:
        run, table, features = self.run, self.conditions.store.stats(), self.pairs.features.stats()
        ledger = run.governor.ledger()
        return {"loss": self._mean_loss(), "rows_per_second": status(run.path)["rows_per_second"], "limit_source": str(run.governor.limit),
                "leased_peak_bytes": ledger.leased_peak_bytes, "hit_rate": table["hit_rate"], "feature_hit_rate": features["hit_rate"],
                "commits": table["commits"], "stall_seconds": (table["stall_ns"] + self.pairs.loader.stall_ns) * 1e-9,
                "rows_skipped": self.notes["rows_skipped"]}

    def _digest(self) -> str:
        """Returns the SHA-256 of everything that was trained: the same for any limit, any sizes, and after any number of kills."""
        found = hashlib.sha256(f"{self.run.steps_made}".encode())
        parts = [self.model.state_dict(), self.optimizer.state_dict()["state"]]
        parts += [self.classifier.state_dict(), self.labeller.state_dict()["state"]] if self.options.phase2_epochs else []
        for part in parts:
            _hash(found, part)
        self.conditions.store.scan(lambda *parts: found.update(b"".join(one.tobytes() for one in parts)))
        return found.hexdigest()


def evaluate_run(options: Options) -> dict[str, Any]:
    """Evaluates the last commit of a run, changing nothing in it."""
    with limited(options) as governor:
        step, parts = committed(options.out)
        pairs = Pairs(governor, options, options.device_name())
        must_be_noted(pairs, parts["notes"])
        model = Model(Shape.of(options, *pairs.widths), options.seed)
        model.load_state_dict(parts["model"])
        place = table_place(options, pairs.rows, governor)
        with EmbeddingStore.open(governor, f"{options.out}/embeddings/{CONDITIONS}", at_step=step, pinned=True,
                                 store_bytes=place["store_bytes"], io_threads=options.io_threads) as table:
            made = Evaluation(model.to(pairs.device), pairs, reader(table), batch_size=parts["notes"]["batch_size"], eval_pairs=options.eval_pairs)
            recall = made.make(FINAL_ANGLES)
        assert recall is not None  # Nobody asks it to stop.
        epoch = parts["notes"]["epoch"]
        pairs.close()
        return Told({"step": step, "epoch": epoch, "recall": recall}, f"step {step}, epoch {epoch}\n{text_of(recall)}")


def must_be_noted(pairs: Pairs, notes: dict[str, Any]) -> None:
    """Checks that the data is that of the run. Errors: ValueError naming the option."""
    if notes["data"] != pairs.fingerprint:
        raise ValueError(f"data: {pairs.features.directory} is another set than the run began with ({pairs.fingerprint}, and was "
                         f"{notes['data']}); the same bits need the same, or train anew in another folder")


def _hash(found: Any, part: Any) -> None:
    """Adds the tensors of a state, in the order of their names."""
    for name, one in sorted(part.items(), key=lambda item: str(item[0])):
        found.update(str(name).encode())
        if isinstance(one, dict):
            _hash(found, one)
        else:
            found.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
