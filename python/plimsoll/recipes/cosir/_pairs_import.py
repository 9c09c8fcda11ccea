# SPDX-License-Identifier: Apache-2.0
"""import_pairs(): encodes the images and texts of an image set with a transformers model, for the recipe `cosir`.

Images are decoded ahead of use (image_batches.cpp) and go through the model's own processor (image_processor()). The
features are appended to files in OUT.work, with the position that a later call resumes from. Batches are the
same wherever a call begins, and so are the bits.

Reading order: import_pairs(), _Import, _Encoder, _Work.
Threads: one owner.
Memory:  the model, a batch of pixels, the model's tensors for it (admitted before the first), images decoded ahead.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ... import _core
from ...core._folders import make_folders, replaced, sync_folder
from ...data._features import FeatureWriter
from ...data._image_processor import image_processor
from ...data._image_set import ImageBatchRow, ImageSet
from ...data.importers._chat_import import shortened
from ...data.importers._row_reader import KeyCounts, key_count
from ...data.importers._set_import import digest
from ...errors import BudgetExceeded, MemoryPressure
from ...memory._adopt import adopt
from ...memory._memory import Governor, pressure_between_steps, with_governor
from ...memory._refusal import unless_refused
from ...training._step import TrainingStep

_VERSION = 2  # Of what becomes of the same inputs.
_DTYPES = ("float32", "float16")
_QUEUE_BYTES = 64 << 20  # Of images decoded ahead.
_COMMIT_SECONDS = 10.0
_COPIED_ROWS = 1024
_EXAMPLES = 3
_LOOKED_AT = 256  # Rows of a set.
_SPARED = 16  # Of the limit one part: a run is stopped above 97 % of it, and what has no lease grows a little.

_Path = str | os.PathLike[str]


@with_governor
def import_pairs(images: _Path, out: _Path, *, model: _Path, batch_size: int = 32, dtype: str = "float32",
                 errors_max: int = 0, threads: int = 1, rebuild: bool = False,
                 progress: Callable[[int, int], object] | None = None, governor: Governor | None = None) -> dict[str, Any]:
    """Makes a FeatureStore in the folder `out` from an image set, for the recipe `cosir`.

        plimsoll.import_vision("captions.jsonl", "captions.images", text_field="caption")
        plimsoll.import_pairs("captions.images", "pairs", model="models/clip-vit-base-patch32")

    A pair is an image and one of its captions. Captions are the assistant's texts of a row; a row without any takes all
    texts but the system's. A pair's id is its number. Its group is the row of the set: captions of a row share an image.
    Columns: "image" and "text", the model's get_image_features() and get_text_features(), not normalised.
    Shape: [width] each.

    images:     an image set whose rows have one image each.
    model:      folder of a transformers model that has both functions (CLIP, SigLIP and others), with its tokenizer and
                image processor. Texts are padded to the model's number of positions, and cut there.
    batch_size: number of images, or texts, passed to the model at once. It decides the last bits.
    dtype:      "float32", or "float16": half the bytes, rounded.
    errors_max: number of rows that may be left out, for lack of a caption or of exactly one image. One more ends the
                import.
    threads:    number of threads that decode.
    rebuild:    makes the store even when neither inputs nor options have changed since `out` was made.
    progress:   called with (rows done, rows in all).

    If the import is killed at any moment, the same call resumes it, to the same bytes. Returns plimsoll.info(out),
    "reused"; "odd": the oddities of rows; "keys": how many keys of their messages were used, belonged to rows
    left out (refused), or were not used, by name; and "first_rows": the captions of the first two rows.
    Errors: ValueError naming the row or the option; BudgetExceeded naming batch_size before the first batch, where the
            limit is too small for it; NotFoundError; CorruptError; OSError; ImportError (no torch, no transformers). The
            work done so far is kept for the next call.
    """
    assert governor is not None  # By with_governor.
    for name, value, least in (("batch_size", batch_size, 1), ("errors_max", errors_max, 0)):
        if value < least:
            raise ValueError(f"{name}: {value} is below {least}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: {dtype!r} is none of {', '.join(_DTYPES)}")
    with _Admission(governor) as admission, ImageSet(images) as pictures:
        libraries()
        options = {"batch_size": batch_size, "dtype": dtype, "errors_max": errors_max}
        name = digest([_VERSION, options, pictures.fingerprint, len(pictures), _sums(pathlib.Path(model))])
        with _Work(pathlib.Path(out), name, rebuild) as work:
            reused = work.whole
            if not reused:
                with governor.reserve(_QUEUE_BYTES):  # Of the images ahead, which are to fit beside.
                    encoder = _Encoder(os.fspath(model), batch_size, governor)
                _Import(pictures, work, encoder, options).run(governor, threads, progress, admission)
                admission.over = True  # Where no row was left, too.
                work.finish(governor, dtype)
            said = work.said
    return {**json.loads(_core.describe(os.fspath(out))), "odd": said["odd"], "keys": said["keys"], "reused": reused,
            "first_rows": said["first_rows"]}


def libraries() -> tuple[Any, Any]:
    """Returns (torch, transformers). Errors: ImportError naming the packages to install."""
    try:
        import PIL  # noqa: F401  Of processors.
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(f"import pairs takes {error.name}, which is not installed: pip install torch "
                          "transformers pillow") from None
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def _sums(folder: pathlib.Path) -> list[list[Any]]:
    """Returns name, bytes and CRC-32C of each file of a model. Errors: ValueError where the folder has no model."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: {folder} has no config.json; give the folder of a model that save_pretrained() wrote")
    sums = []
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        crc, size = 0, 0
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                crc, size = _core.crc32c(np.frombuffer(block, np.uint8), crc), size + len(block)
        sums.append([path.name, size, crc])
    return sums


class _Encoder:
    """A transformers model with its tokenizer and processor, admitted for a batch of images and a batch of texts."""

    def __init__(self, folder: str, batch_size: int, governor: Governor) -> None:
        """Loads the model. Errors: ValueError naming what is missing; BudgetExceeded naming batch_size."""
        self._torch, transformers = libraries()
        local: dict[str, Any] = {"local_files_only": True}
        try:
            self._model = transformers.AutoModel.from_pretrained(folder, dtype=self._torch.float32, **local).eval()
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **local)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"model: {folder}: {error}") from None
        if not all(hasattr(self._model, name) for name in ("get_image_features", "get_text_features")):
            raise ValueError(f"model: {folder}: {type(self._model).__name__} has no get_image_features() and "
                             "get_text_features(), as CLIP and SigLIP have")
        self._processor = image_processor(processor)
        self._length = int(self._model.config.get_text_config().max_position_embeddings)
        self._governor = governor
        adopt(self._model, governor=governor)
        self._admit(batch_size)

    def rehearse(self, batch_size: int, pixels: np.ndarray, governor: Governor) -> None:
        """Encodes a batch of each kind and discards it, while everything that the import will lease is leased.

        Errors: BudgetExceeded, with a limit that suffices, where leases and unleased memory together do not fit. It comes
        before the first batch, rather than once images are decoded ahead.
        """
        _check_room(governor)
        prepared = self.prepared(pixels)
        self.of_images([{key: each.copy() for key, each in prepared.items()} for _ in range(batch_size)])
        self.of_texts(["a"] * batch_size)
        _check_room(governor)

    def _blank(self) -> dict[str, np.ndarray]:
        return self.prepared(np.zeros((64, 64, 3), np.uint8))

    @property
    def image_bytes(self) -> int:
        """Bytes of one prepared image."""
        return sum(each.nbytes for each in self._blank().values())

    def _admit(self, batch_size: int) -> None:
        step = TrainingStep(self._model, None)
        blank = self._blank()
        self._admit_copies(step, self._pixels([blank]), batch_size, self._images)
        self._admit_copies(step, self._tokens(["a"]), batch_size, self._texts)

    def _admit_copies(self, step: TrainingStep, one: dict[str, Any], count: int,
                      f: Callable[[dict[str, Any]], Any]) -> None:
        """Admits a batch of copies of one image or text. Lists of as many would be memory that no lease counts."""
        batch = self._fitting(lambda: {key: each.repeat_interleave(count, 0) for key, each in one.items()})
        try:
            step.admit_evaluation((batch,), f)
        except BudgetExceeded as error:
            error.args = (f"{error}; or a smaller batch_size (--batch-size)", *error.args[1:])
            raise

    def prepared(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Prepares an image for the model with its processor. Shape: uint8 [height, width, 3] → arrays [1, …], by name."""
        return dict(self._processor([pixels], return_tensors="np"))

    def of_images(self, prepared: list[dict[str, np.ndarray]]) -> np.ndarray:
        """Returns the features of prepared images. Shape: float32 [images, width]. Errors: BudgetExceeded."""
        return self._run(self._images, self._fitting(lambda: self._pixels(prepared)))

    def of_texts(self, texts: list[str]) -> np.ndarray:
        """Returns the features of texts. Shape: float32 [texts, width]. Errors: BudgetExceeded."""
        return self._run(self._texts, self._tokens(texts))

    def _pixels(self, prepared: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        made = {}
        for key, first in prepared[0].items():
            made[key] = self._torch.empty((len(prepared), *first.shape[1:]), dtype=self._torch.from_numpy(first).dtype)
            for into, one in zip(made[key], prepared, strict=True):
                into.copy_(self._torch.from_numpy(one[key][0]))
        return made

    def _tokens(self, texts: list[str]) -> dict[str, Any]:
        return dict(self._tokenizer(texts, padding="max_length", truncation=True, max_length=self._length,
                                    return_tensors="pt"))

    def _images(self, batch: dict[str, Any]) -> Any:
        return _tensor_of(self._model.get_image_features(**batch))

    def _texts(self, batch: dict[str, Any]) -> Any:
        return _tensor_of(self._model.get_text_features(**batch))

    def _run(self, f: Callable[[dict[str, Any]], Any], batch: dict[str, Any]) -> np.ndarray:
        if (pressure := pressure_between_steps()) is not None:
            raise pressure
        with self._torch.no_grad():
            features: np.ndarray = self._fitting(lambda: f(batch)).numpy()
        return features

    def _fitting(self, work: Callable[[], Any]) -> Any:
        """Returns work(). Errors: BudgetExceeded naming batch_size, where memory is refused."""
        made, refusal = unless_refused(work)
        if refusal is not None:
            raise self._governor.refusal("tensors", 0, f"a batch did not fit: {refusal}; a smaller batch_size (--batch-size) "
                                                       "would help, or a larger limit")
        return made


class _Admission:
    """Turns MemoryPressure before the first batch into a BudgetExceeded that names a sufficient limit.

    It is around all else: the watcher's stop may come at any instruction, also while another refusal is on its way out.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor, self.over = governor, False

    def __enter__(self) -> _Admission:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, MemoryPressure) and not self.over:
            raise _not_admitted(self._governor, 0, error.smallest_limit_bytes) from None


def _check_room(governor: Governor) -> None:
    """Checks the room for the import. Errors: BudgetExceeded where all leases, once used, and unleased memory come near the limit."""
    report, ledger = governor.step_boundary(), governor.ledger()
    short = ledger.crowded_bytes + ledger.limit_bytes // _SPARED - ledger.free_bytes
    if short > 0 or report.stop:
        raise _not_admitted(governor, max(short, 0), report.needed_bytes)


def _not_admitted(governor: Governor, short: int, needed: int) -> BudgetExceeded:
    ledger = governor.ledger()
    spared = 2 * max(short, ledger.limit_bytes) // _SPARED  # What has no lease differs by as much from start to start.
    needed = max(needed, ledger.limit_bytes + short + spared)
    needed = -(-needed // (1 << 20)) << 20
    return governor.refusal("other", short, f"the import is not admitted: {ledger.explain()}; a limit of {needed >> 20} MiB "
                            "would do, or a smaller batch_size (--batch-size)", limit_bytes=needed)


def _tensor_of(found: Any) -> Any:
    return getattr(found, "pooler_output", found)  # Of earlier versions of transformers the tensor itself.


class _Import:
    """Encodes the rows of a set into features."""

    def __init__(self, pictures: ImageSet, work: _Work, encoder: _Encoder, options: dict[str, Any]) -> None:
        self._pictures, self._work, self._encoder, self._options = pictures, work, encoder, options

    def run(self, governor: Governor, threads: int, progress: Callable[[int, int], object] | None,
            admission: _Admission) -> None:
        """Encodes all rows that are left. Errors: those of import_pairs()."""
        at, total = self._work.said["row"], len(self._pictures)
        if at == total:
            return
        batches = self._pictures.batches(1, governor=governor, shuffle=False, threads=threads, queue_bytes=_QUEUE_BYTES,
                                         place=(0, at))
        size = self._options["batch_size"]
        with contextlib.closing(batches), governor.reserve(size * self._encoder.image_bytes):  # Images that wait.
            self._encoder.rehearse(size, self._largest(), governor)
            committed = time.monotonic()
            waiting: list[tuple[int, dict[str, np.ndarray], list[str]]] = []
            for batch in batches:
                for row in batch:
                    at = row.row + 1
                    if (captions := self._captions(row)) is not None:
                        if len(self._work.said["first_rows"]) < 2:
                            self._work.said["first_rows"].append(f"[image of row {row.row}]: ⟦{shortened('⟧ ⟦'.join(captions))}⟧")
                        waiting.append((row.row, self._encoder.prepared(row.images[0]), captions))
                    del row
                del batch
                if len(waiting) == self._options["batch_size"] or (waiting and at == total):
                    self._encode(waiting)
                    admission.over = True
                    waiting.clear()
                    self._work.said["row"] = at
                    if time.monotonic() - committed >= _COMMIT_SECONDS:
                        self._work.commit()
                        committed = time.monotonic()
                if progress is not None:
                    progress(at, total)
        self._work.said["row"] = total
        self._work.commit()

    def _largest(self) -> np.ndarray:
        """Returns the largest image among rows sampled evenly from the set, to stand for all."""
        rows = range(0, len(self._pictures), -(-len(self._pictures) // _LOOKED_AT))
        sizes = ((width * height, row, number) for row in rows for number, (width, height) in enumerate(self._pictures[row].sizes))
        _, row, number = max(sizes, default=(0, -1, 0))
        return np.zeros((64, 64, 3), np.uint8) if row < 0 else self._pictures.image(row, number)

    def _captions(self, row: ImageBatchRow) -> list[str] | None:
        """Returns a row's captions, or None where it is left out. Counts every key of its messages."""
        texts: dict[str, list[str]] = {}
        for message in row.messages:
            if message["role"] != "system":
                of = "assistant" if message["role"] == "assistant" else "user"
                texts.setdefault(of, []).extend(part["text"].strip() for part in message.get("content", [])
                                                if part["type"] == "text" and part["text"].strip())
        who = "assistant" if texts.get("assistant") else "user"
        captions = texts.get(who)
        keys = KeyCounts(self._work.said["keys"])
        if not captions:
            self._odd("no_caption", row.row, "no caption: no text in its messages")
        elif len(row.images) != 1:
            self._odd("not_one_image", row.row, f"{len(row.images)} images, and a pair has one")
            captions = None
        if captions:
            counted: dict[str, int] = {}
            for message in row.messages:
                captioning = message["role"] != "system" and (message["role"] == "assistant") == (who == "assistant")
                for name, value in message.items():
                    for part in value if name == "content" else ():
                        if part["type"] != "image" and not captioning:  # A question, the system's text.
                            counted[message["role"]] = counted.get(message["role"], 0) + len(part)
                    if name not in ("role", "content"):
                        counted[f"messages.{name}"] = counted.get(f"messages.{name}", 0) + 1 + key_count(value)
            keys.add(key_count(row.messages) - sum(counted.values()), 0, ((name, 1, count) for name, count in counted.items()))
        else:
            keys.add(0, key_count(row.messages), ())
        self._work.said["keys"] = keys.said()
        return captions or None

    def _odd(self, key: str, row: int, text: str) -> None:
        said = self._work.said
        odd = said["odd"].setdefault(key, {"count": 0, "first": []})
        odd["count"] += 1
        odd["first"] += [f"row {row}"] if len(odd["first"]) < _EXAMPLES else []
        said["errors"] += 1
        if said["errors"] > self._options["errors_max"]:
            raise ValueError(f"{self._pictures.path}: row {row}: {text}: import a set without it, or have more rows left "
                             "out with errors_max (--errors-max)")

    def _encode(self, rows: list[tuple[int, dict[str, np.ndarray], list[str]]]) -> None:
        size = self._options["batch_size"]
        captions = [text for _, _, texts in rows for text in texts]
        texts = np.concatenate([self._encoder.of_texts(captions[k:k + size]) for k in range(0, len(captions), size)])
        numbers = np.array([row for row, _, _ in rows], np.int64)
        counts = [len(texts) for _, _, texts in rows]
        self._work.append(self._rounded(self._encoder.of_images([one for _, one, _ in rows]), numbers, "image"),
                          self._rounded(texts, np.repeat(numbers, counts), "text"), numbers, counts)

    def _rounded(self, features: np.ndarray, rows: np.ndarray, what: str) -> np.ndarray:
        with np.errstate(over="ignore"):
            made = features.astype(self._options["dtype"])
        bad = ~np.isfinite(made).all(axis=1)
        if bad.any():
            more = "; use dtype float32 (--dtype float32)" if np.isfinite(features).all() else ""
            raise ValueError(f"{self._pictures.path}: row {rows[bad][0]}: its {what} features are not finite in "
                             f"{self._options['dtype']}{more}")
        return made


class _Work:
    """The unfinished features in OUT.work: files `image`, `text` and `pairs`. `said` records how much of them is valid.

    Errors: ValueError where another process works there, or OUT is something else; OSError.
    """

    def __init__(self, out: pathlib.Path, name: str, rebuild: bool) -> None:
        self._out, self._folder, self._name = out, out.with_name(out.name + ".work"), name
        self._rebuild = rebuild
        self._files: dict[str, Any] = {}
        self.whole = False
        self.said: dict[str, Any] = {"name": name, "row": 0, "images": 0, "pairs": 0, "widths": [0, 0], "errors": 0,
                                     "odd": {}, "keys": KeyCounts().said(), "first_rows": [], "finishing": False}

    def __enter__(self) -> _Work:
        if self._folder.exists() and any(self._folder.iterdir()) and not (self._folder / "lock").exists():
            raise ValueError(f"{self._folder} is in the way, and no import of pairs made it")
        make_folders(self._folder)
        with contextlib.ExitStack() as until_open:
            self._lock = until_open.enter_context(open(self._folder / "lock", "w", encoding="ascii"))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self._folder}: another process is writing there") from None
            self._begin()
            until_open.pop_all()
        return self

    def _begin(self) -> None:
        made, under_way = _read(self._out / "pairs.json"), _read(self._folder / "said")
        if made is not None and made["name"] == self._name and not self._rebuild:
            self.whole, self.said = True, made
            self._remove()
            return
        ours = made is not None or (under_way is not None and under_way["finishing"])
        if under_way is not None and under_way["name"] == self._name and not self._rebuild:
            self.said = under_way
        if self._out.exists() and any(self._out.iterdir()) and not ours:
            raise ValueError(f"{self._out} is there, and no import of pairs made it: choose another folder, or remove it")
        for name in ("image", "text", "pairs"):
            path = self._folder / name
            self._files[name] = open(path, "r+b" if path.exists() else "w+b")
            self._files[name].truncate(self._bytes(name))
            self._files[name].seek(0, os.SEEK_END)

    def __exit__(self, *_: object) -> None:
        for file in (*self._files.values(), self._lock):
            file.close()

    def append(self, image: np.ndarray, text: np.ndarray, rows: np.ndarray, counts: list[int]) -> None:
        """Appends images and captions. Shape: image [images, width], text [captions, width], rows int64 [images] of the set.

        counts: number of captions per image.
        """
        self.said["widths"] = [image.shape[1] * image.itemsize, text.shape[1] * text.itemsize]
        pairs = np.empty((len(text), 2), np.int64)  # The set's row, and the number of its image in the file.
        pairs[:, 0] = np.repeat(rows, counts)
        pairs[:, 1] = np.repeat(self.said["images"] + np.arange(len(rows)), counts)
        for name, array in (("image", image), ("text", text), ("pairs", pairs)):
            self._files[name].write(np.ascontiguousarray(array).data)
        self.said["images"] += len(image)
        self.said["pairs"] += len(text)

    def commit(self) -> None:
        """Makes the appended features durable, with the position to resume from."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        with replaced(self._folder / "said") as partial:
            partial.write_text(json.dumps(self.said), encoding="utf-8")

    def finish(self, governor: Governor, dtype: str) -> None:
        """Makes the store from the work folder, and removes the folder. Errors: ValueError where there is no pair; OSError."""
        if self.said["pairs"] == 0:
            raise ValueError(f"{self._out}: no row has an image and a caption: {json.dumps(self.said['odd'])}")
        if not self.said["finishing"]:
            if self._out.exists():  # An earlier import's.
                os.replace(self._out, self._folder / "earlier")
                sync_folder(self._folder.absolute().parent)
            self.said["finishing"] = True
            self.commit()
        if not self._out.exists():
            size = np.dtype(dtype).itemsize
            widths = [width // size for width in self.said["widths"]]
            columns = {"image": (dtype, (widths[0],)), "text": (dtype, (widths[1],))}
            with FeatureWriter(governor, self._out, columns, grouped=True) as writer:
                for ids, groups, image, text in self._chunks(dtype, widths):
                    writer.append(ids, image=image, text=text, groups=groups)
        with replaced(self._out / "pairs.json") as partial:
            partial.write_text(json.dumps(self.said), encoding="utf-8")
        self._remove()

    def _remove(self) -> None:
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":  # While others are there it says whose the folder is.
                path.unlink()
        shutil.rmtree(self._folder)

    def _chunks(self, dtype: str, widths: list[int]) -> Iterator[tuple[Any, ...]]:
        for begin in range(0, self.said["pairs"], _COPIED_ROWS):
            count = min(_COPIED_ROWS, self.said["pairs"] - begin)
            pairs = self._read_rows("pairs", begin, count, np.int64, 2)
            first, last = int(pairs[0, 1]), int(pairs[-1, 1])
            images = self._read_rows("image", first, last + 1 - first, dtype, widths[0])
            yield (np.arange(begin, begin + count), pairs[:, 0].copy(), images[pairs[:, 1] - first],
                   self._read_rows("text", begin, count, dtype, widths[1]))

    def _read_rows(self, name: str, begin: int, count: int, dtype: Any, width: int) -> np.ndarray:
        out = np.empty((count, width), dtype)
        self._files[name].seek(begin * width * out.itemsize)
        if self._files[name].readinto(out.data.cast("B")) != out.nbytes:
            raise OSError(f"{self._folder / name} is shorter than it was")
        return out

    def _bytes(self, name: str) -> int:
        image, text = self.said["widths"]
        return {"image": self.said["images"] * image, "text": self.said["pairs"] * text,
                "pairs": self.said["pairs"] * 16}[name]


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
