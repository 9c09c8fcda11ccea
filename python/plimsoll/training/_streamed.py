# SPDX-License-Identifier: Apache-2.0
"""stream_frozen: frozen weights of a model's blocks stay on disk, and are read ahead of use.

Reading order: _weight_files.py, _weight_ring.py, this file.

Threads: the thread that trains, and the ring's.   Memory: the ring's; a number for each parameter.
"""
from __future__ import annotations

import collections
import contextlib
import functools
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from .. import _core
from ..core import _torch_gate
from ..core._arrays import byte_size
from ..core._devices import numbered
from ..core._folders import replaced
from ..errors import CorruptError
from ..memory._device_memory import reserved_for
from ..memory._memory import Governor, format_bytes
from ..memory._refusal import is_of_device
from ..memory._scratch import folder_of_run, scratch_folder
from ._device_ring import DeviceRing
from ._weight_files import Place, WeightReader, bytes_of, found_in, places_in, plain, renamed, write_tensors
from ._weight_ring import WeightRing

if TYPE_CHECKING:
    import torch

_FILE = "frozen.safetensors"
_HOST_SLOTS = 2  # On the way to a device: one is read, one is copied.
_CACHES = ("cache", "past_key_value", "past_key_values", "layer_past")  # Of keys and values: transformers' names.


def stream_frozen(model: torch.nn.Module, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
                  *, weights: str = "auto", slots: int = 2, device: str | torch.device | None = None,
                  cache_bytes: int | str | None = None, directory: str | os.PathLike[str] | None = None) -> StreamedWeights:
    """Leaves the frozen weights of the model's blocks on disk, and reads them ahead of use through a few slots.

        config = transformers.AutoConfig.from_pretrained("DIR")
        with accelerate.init_empty_weights():  # Or .from_pretrained("DIR", dtype="auto"), which maps the files.
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.requires_grad_(False)
        plimsoll.stream_frozen(model, "DIR")  # Reads what is to be in memory; ties what is tied.
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))  # Or before.

    Blocks are the modules of every torch.nn.ModuleList whose entries are of one type, outermost first. Of them
    the parameters that require no gradient are streamed: forward in the order of the blocks, and in backward,
    where each block runs again (torch.utils.checkpoint at its border, so that activations within blocks are not
    kept either), in the reverse order. All other parameters stay in memory, and so do those that are in two places:
    tied ones, those of a module in two blocks, and views of the same values. Any order of use is right, and
    another than this waits for the disk. The bits are those of the resident model.

    model:   made before; the values of streamed weights are let go. Parameters on the meta device, other than
             trained ones, are read from `files`; where there are such, buffers that are part of the model's state
             (running means of a batch norm) are read, too, if the files have them.
    files:   safetensors files or their folder, with the values the model has; None: they are written once to
             `directory`. Names are the model's, or those that transformers loads it from; PEFT's additions to them, and
             what stands before them, are overlooked. A floating dtype other than the model's is converted as it is read, 32 KiB at a time and to
             the bits of Tensor.to(): never are both there whole.
    weights: "resident": they are read into memory leased for tensors; "streamed"; "auto": resident where they
             take at most half of what the governor has free. Bits do not depend on it.
    slots:   blocks in memory at a time: 2 or more.
    device:  of torch's, where the model computes: all of it is moved there, and streamed weights come through two slots of
             pinned host memory to `slots` slots there. None: the model stays on the CPU.
    cache_bytes: of host memory for blocks that stay there once they are read, as bytes or "8GiB". The governor takes it back when
             it is needed. None: with a device half of what the governor has free, as a disk is slower than a bus; else 0.
    directory: of the written file; None: the open Run's folder, or as TrainingStep's.

    In a state_dict(), and so in a commit of a Run, the checksum of a weight stands in its place. Loaded again it
    is compared: with other files, or damaged ones, CorruptError names file and tensor when it is read, for the first
    time or after the file was written. So a run goes on, streamed or resident, from the same files alone.
    Outside of its block a streamed parameter has its shape and dtype and no values: RuntimeError names it. In a
    forked process the model does not run. Caches of keys and values are left out where gradients are made. Where
    torch.utils.checkpoint goes around a part of a block, that part runs a third time, and the block may be read once more.
    Memory:  slots × the largest block, 4 MiB, and cache_bytes, leased when it is made. With a device two slots of the host's, and
             `slots` there.
    Errors:  BudgetExceeded; ValueError naming the argument or the parameter; NotFoundError; CorruptError; OSError. A model that did
             not fit on a device has parts there and on the host: make it again.
    """
    _torch_gate.load()
    if weights not in ("auto", "resident", "streamed"):
        raise ValueError(f"weights: {weights!r} is none of 'auto', 'resident', 'streamed'")
    if slots < 2:
        raise ValueError(f"slots: {slots}; it is 2 or more: one block runs, and the next one is read")
    governor = Governor.current()
    if governor is None:
        raise ValueError("stream_frozen: there is no Governor that its memory is leased from: make one first, or a Run")
    if hasattr(model, "tie_weights") and any(one.is_meta for one in model.parameters()):
        cast(Any, model).tie_weights()  # Of transformers: from_pretrained() does it when it has loaded, and from_config() not at all.
    where = numbered(device, "device")
    _must_be_on_the_host(model, files is not None, where is not None)
    blocks = _blocks_of(model)
    if not blocks:
        tied = [names for names in _names_of(model, frozen=True).values() if len(names) > 1]
        raise ValueError("model: it has no torch.nn.ModuleList of two or more modules of one type with parameters "
                         "that require no gradient: model.requires_grad_(False) freezes all"
                         + (f"; {tied[0][0]} is {tied[0][1]}, too, so it stays in memory" if tied else ""))
    size = sum(owned.size for block in blocks for owned in block.owned)
    streamed = weights == "streamed" or (weights == "auto" and 2 * size > _room(governor, where)())
    if streamed:
        _must_be_values(blocks)
    places = None if files is None else renamed(model, places_in(files))
    with contextlib.ExitStack() as undo, _there(governor, model, blocks if streamed else [], slots, where):
        reader = WeightReader()
        undo.callback(reader.close)
        if places is None and streamed:
            places = _written(blocks, _folder(directory) / _FILE, reader)
        if places is not None:
            for block in blocks:
                block.places = [_place_of(owned, places) for owned in block.owned]
            _fill(model, blocks, places, streamed, where)
        ring: WeightRing | DeviceRing | None = None
        if streamed:
            cache = governor.ledger().free_bytes // 2 if where is not None else 0
            if cache_bytes is not None:
                cache = byte_size(cache_bytes, "cache_bytes")
            ring = host = WeightRing([block.places for block in blocks], slots if where is None else _HOST_SLOTS, governor, reader, where, cache)
            undo.pop_all()  # The ring has the reader.
            undo.callback(host.close)
            if where is not None:
                ring = DeviceRing(host, where, slots, _room(governor, where))
                undo.callback(ring.close)
                governor._on_their_way.add(ring)
        made = StreamedWeights(blocks, size, ring, where)
        if where is not None:
            _move(model, where)
        if ring is not None:
            undo.pop_all()
            governor._adopt(ring)
    return made


class StreamedWeights:
    """Frozen weights as stream_frozen() made them. They live as long as the model, or until they or the governor are closed."""

    def __init__(self, blocks: list[_Block], size: int, ring: WeightRing | DeviceRing | None, device: torch.device | None) -> None:
        """Takes what stream_frozen() made."""
        self._ring = ring
        self.bytes = size
        """The bytes of the frozen weights."""
        if ring is not None:
            weakref.finalize(self, ring.close)
        for number, block in enumerate(blocks):
            for owned in block.owned:
                owned.stand_in_state_dict(None if ring is None else owned.absent(device))
            if ring is not None:
                block.stream(number, len(blocks), ring).weights = self

    @property
    def streamed(self) -> bool:
        """Whether the weights are on disk; else they are in memory."""
        return self._ring is not None

    @property
    def ring_bytes(self) -> int:
        """Bytes that are leased for streamed weights."""
        return 0 if self._ring is None else self._ring.bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of blocks that stay in host memory, a part of ring_bytes."""
        return 0 if self._ring is None else self._ring.kept_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of slots on the device, and of blocks that stay there."""
        return 0 if self._ring is None else self._ring.device_bytes

    @property
    def stall_seconds(self) -> float:
        """Seconds that the model has waited for the disk, or for copies to a device to begin, so far."""
        return 0.0 if self._ring is None else self._ring.stall_seconds

    def close(self) -> None:
        """Ends the reading; a model whose weights were streamed does not run afterwards."""
        if self._ring is not None:
            self._ring.close()

    def __repr__(self) -> str:
        return f"<StreamedWeights, {format_bytes(self.bytes)} {'streamed' if self.streamed else 'resident'}>"


class _Owned:
    """A frozen parameter of a block."""

    def __init__(self, module: Any, name: str, full_name: str) -> None:
        self.module, self.name, self.full_name = module, name, full_name
        parameter = self.parameter
        self.dtype, self.shape = parameter.dtype, parameter.shape
        self.size = parameter.numel() * parameter.element_size()
        self.place: Place | None = None

    @property
    def parameter(self) -> Any:
        return self.module._parameters[self.name]

    def absent(self, device: torch.device | None) -> Any:
        from ._absent import Absent

        return Absent.like(self.parameter, self.full_name, device)

    def put(self, tensor: Any) -> None:
        import torch

        self.module._parameters[self.name] = tensor if isinstance(tensor, torch.nn.Parameter) \
            else torch.nn.Parameter(tensor, requires_grad=False)

    def view(self, data: Any) -> Any:
        """Views a block's bytes as the parameter's values."""
        return data.view(self.dtype).view(self.shape)

    def stand_in_state_dict(self, absent: Any) -> None:
        """Puts the checksum in the module's state_dict(). `absent`: what the module has outside of its block, or None."""
        import torch

        if absent is not None:
            self.put(absent)

        def saved(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
            if prefix + self.name in state:
                state[prefix + self.name] = torch.tensor(self.checksum())

        def loading(_: Any, state: dict[str, Any], prefix: str, __: Any, ___: Any, ____: Any, _____: Any,
                    errors: list[str]) -> None:
            value = state.get(prefix + self.name)
            if value is None:
                return
            if value.dtype == torch.int64 and value.dim() == 0:
                self.expect(int(value))
            else:
                errors.append(f"{self.full_name} stays on disk (stream_frozen): its values are not loaded from a state "
                              "dict. Leave it out")
            state[prefix + self.name] = self.parameter  # Copied onto itself.

        self.module.register_state_dict_post_hook(saved)
        self.module.register_load_state_dict_pre_hook(loading)

    def checksum(self) -> int:
        """Returns the checksum of the parameter's values; −1: they have not been read."""
        if self.place is None:
            return _core.crc32c(bytes_of(self.parameter.cpu()))
        return max(self.place.checksum, self.place.expected)

    def expect(self, checksum: int) -> None:
        """Compares the checksum. Errors: CorruptError where it differs."""
        if checksum >= 0 and self.place is not None:
            self.place.expect(checksum)
        elif checksum >= 0 and self.checksum() != checksum:
            raise CorruptError(f"{self.full_name} is not what training began with: its checksum is "
                               f"{self.checksum():08x} and was {checksum:08x}. Make the model as it was, or train anew")


class _Block:
    """A module of a list of them, and its frozen parameters."""

    def __init__(self, module: Any, owned: list[_Owned]) -> None:
        self.module, self.owned = module, owned

    @property
    def places(self) -> list[Place]:
        return [owned.place for owned in self.owned if owned.place is not None]

    @places.setter
    def places(self, places: list[Place]) -> None:
        for owned, place in zip(self.owned, places):
            owned.place = place

    def stream(self, number: int, count: int, ring: WeightRing | DeviceRing) -> Any:
        """Replaces the block's forward, which is returned, by one that runs with weights of the ring, and again in backward."""
        from torch import is_grad_enabled
        from torch.utils.checkpoint import checkpoint

        def again(at: int) -> Any:
            return self.owned[at].view(ring.use(number)[at])

        absent = [owned.parameter for owned in self.owned]
        for at, none in enumerate(absent):
            none.bring = functools.partial(again, at)
        inner = self.module.forward

        @contextlib.contextmanager
        def there(after: list[int]) -> Iterator[None]:
            try:
                for owned, data in zip(self.owned, ring.use(number, after)):
                    owned.put(owned.view(data))
                del owned, data  # The slot is free when the last of them is gone.
                yield
            finally:
                for owned, none in zip(self.owned, absent):
                    owned.put(none)

        def once(after: list[int], *args: Any, **kwargs: Any) -> Any:
            with there(after):
                return inner(*args, **kwargs)

        # What comes next; ends meet, as step follows step.
        forward, backward = [(number + 1) % count], [number - 1 if number else min(1, count - 1)]
        turn = backward if number == count - 1 else forward

        @functools.wraps(inner)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            if not is_grad_enabled():
                return once(forward, *args, **kwargs)
            kwargs.update({name: None for name in _CACHES if _is_cache(kwargs.get(name))})
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
            calls = iter([turn])
            return checkpoint(lambda *a, **k: once(next(calls, backward), *a, **k), *args, use_reentrant=False, **kwargs)

        self.module.forward = streamed
        return streamed


def _is_cache(value: Any) -> bool:
    """Whether `value` is a cache of transformers, or the tuples of its older models."""
    return isinstance(value, tuple) or hasattr(value, "get_seq_length")


def _blocks_of(model: Any) -> list[_Block]:
    """Returns the blocks in the order of the model, with the frozen parameters that only they have."""
    import torch

    parts, held = _counted(model)
    alike = _of_same_values(model)
    found: list[_Block] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or id(module) in inside or len(module) < 2 \
                or len({type(one) for one in module}) > 1:
            continue
        own: dict[int, _Block] = {}  # A block that is there twice is one.
        for number, block in enumerate(module):
            if id(block) in inside or id(block) in own:
                continue
            within = _counted(block)[1]
            once = collections.Counter(id(one) for part in block.modules() for one in part._parameters.values())
            own[id(block)] = _Block(block, [
                _Owned(part, key, ".".join(filter(None, (name, str(number), path, key))))
                for path, part in block.named_modules() for key, parameter in part._parameters.items()
                if parameter is not None and not parameter.requires_grad and parameter.numel() and once[id(parameter)] == 1
                and held[id(parameter)] == parts[id(block)] * within[id(parameter)] and id(parameter) not in alike])
        if any(block.owned for block in own.values()):
            inside.update(id(part) for part in module.modules())
            found += [block for block in own.values() if block.owned]
    return found


def _counted(module: Any) -> tuple[collections.Counter[int], collections.Counter[int]]:
    """Returns how often each module, and each parameter, occurs in the module, by id."""
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    return collections.Counter(map(id, parts)), collections.Counter(id(one) for part in parts for one in part._parameters.values())


def _of_same_values(model: Any) -> set[int]:
    """Returns the ids of parameters whose memory another one has, too."""
    spans = []  # (first byte, end, id).
    for one in model.parameters():
        if one.numel() and not one.is_meta:
            last = sum((size - 1) * step for size, step in zip(one.shape, one.stride()))
            spans.append((one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size(), id(one)))
    alike: set[int] = set()
    end, other = 0, 0  # Of the span that ends last, so far.
    for begin, until, one in sorted(spans):
        if begin < end:
            alike |= {other, one}
        if until > end:
            end, other = until, one
    return alike


def _must_be_on_the_host(model: Any, has_files: bool, moves: bool) -> None:
    from ._absent import Absent

    for name, parameter in model.named_parameters():
        if isinstance(parameter, Absent):
            raise ValueError(f"model: {name} is streamed already")
        if parameter.is_meta and (parameter.requires_grad or not has_files):
            raise ValueError(f"model: {name} is on the meta device and has no values: "
                             + ("it is trained, so make it on the CPU" if has_files else "name its files=…"))
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(f"model: {name} is on {parameter.device} already: make the model on the CPU, and name device={str(parameter.device)!r}")
    alike = _of_same_values(model) if moves else ()
    for name, parameter in model.named_parameters():
        if id(parameter) in alike and parameter.requires_grad:
            raise ValueError(f"model: {name} and another parameter are views of the same values, which torch's model.to(device) would part: "
                             "make them one parameter")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"model: the buffer {name} is on the meta device, and files may have none: make the model with "
                             "its buffers, as accelerate.init_empty_weights() does")


def _must_be_values(blocks: list[_Block]) -> None:
    """Raises ValueError naming a parameter that is more than its values, such as one of bitsandbytes' Linear4bit."""
    import torch

    for owned in (owned for block in blocks for owned in block.owned):
        if type(owned.parameter) is not torch.nn.Parameter:
            raise ValueError(f"model: {owned.full_name} is a {type(owned.parameter).__qualname__}, which has more than its values, and does not stream: "
                             "say weights=\"resident\"; weights of nf4 and int8 stream in the recipes chat and vision, which quantise an unquantised model "
                             "themselves: base = \"nf4\" (--base nf4)")


def _room(governor: Governor, device: torch.device | None) -> Callable[[], int]:
    """Returns what gives the bytes that are free where the model will be. For a device it holds no governor: a ring keeps it."""
    import torch

    if device is None:
        return lambda: governor.ledger().free_bytes
    limited = governor.device_memory(device)
    return lambda: limited.free_bytes if limited else int(torch.accelerator.get_memory_info(device)[0])


def _names_of(model: Any, frozen: bool = False) -> dict[int, list[str]]:
    """Returns the names of each parameter, by its id: a file has a shared one under one of its names. frozen: only parameters without gradients."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        if not (frozen and one.requires_grad):
            names.setdefault(id(one), []).append(name)
    return names


def _place_of(owned: _Owned, places: dict[str, Place], names: Iterable[str] = ()) -> Place:
    """Returns the parameter's place in the files. names: other names that it may have there. Errors: ValueError where it is missing or differs."""
    found = next(filter(None, (found_in(name, owned, places) for name in (owned.full_name, *names))), None)
    if found is None:
        raise ValueError(f"files: none has {plain(owned.full_name)}, a frozen parameter of the model")
    return found


def _fill(model: Any, blocks: list[_Block], places: dict[str, Place], streamed: bool, device: torch.device | None) -> None:
    """Reads what is to be in memory: what has no values, buffers of a model made without, and where weights are resident
    those of the blocks. For a device one parameter at a time is in host memory."""
    import torch

    def read(place: Place, tensor: Any) -> Any:
        reader.read(place, tensor.reshape(-1).view(torch.uint8).numpy())
        return tensor

    reader = WeightReader()
    made_empty = any(one.is_meta for one in model.parameters())
    mine = {(id(owned.module), owned.name): owned for block in blocks for owned in block.owned}
    made: dict[int, Any] = {}  # Parameters that several modules share stay one.
    names = _names_of(model)
    try:
        for path, module in model.named_modules():
            for name, parameter in list(module._parameters.items()):
                owned = mine.get((id(module), name))
                if parameter is None or (streamed if owned else not parameter.is_meta):
                    continue
                owned = owned or _Owned(module, name, ".".join(filter(None, (path, name))))
                if id(parameter) not in made:
                    place = owned.place or _place_of(owned, places, names[id(parameter)])
                    tensor = read(place, torch.empty(owned.shape, dtype=owned.dtype))
                    made[id(parameter)] = (parameter, torch.nn.Parameter(tensor if device is None else tensor.to(device), requires_grad=False))
                owned.put(made[id(parameter)][1])
            for name, buffer in module._buffers.items() if made_empty else ():
                if buffer is None or name in module._non_persistent_buffers_set or not buffer.numel():
                    continue
                found = found_in(".".join(filter(None, (path, name))), buffer, places)
                if found is not None:
                    buffer.copy_(read(found, torch.empty_like(buffer, memory_format=torch.contiguous_format)))
    finally:
        reader.close()


@contextlib.contextmanager
def _there(governor: Governor, model: Any, streamed: list[_Block], slots: int, device: torch.device | None) -> Iterator[None]:
    """Brings the model to the device inside the block. Errors: BudgetExceeded, if the device has a limit, naming the need and the room."""
    import torch

    memory = None if device is None else governor.device_memory(device)
    if memory is None:
        yield
        return
    mine = {id(owned.parameter) for block in streamed for owned in block.owned}
    sizes = [1 if id(one) in mine else one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers())]
    block = max((sum(owned.size for owned in block.owned) for block in streamed), default=0)
    needed, free = reserved_for([*sizes, *[block] * (slots if streamed else 0)]), memory.free_bytes
    before = memory.reserved_bytes
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not is_of_device(error):
            raise
        raise memory.refusal(f"stream_frozen: the model takes {format_bytes(needed)} of {memory.name}, {'streamed' if streamed else 'resident'}, and its "
                             f"device_memory_limit left {format_bytes(free)}", before + needed) from None


def _move(model: Any, device: torch.device) -> None:
    """Moves it; what is tied stays so, where torch makes new parameters, too (a device of its PrivateUse1)."""
    tied: dict[int, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                tied.setdefault(id(one), []).append((module, name))
    model.to(device)
    for (first, its_name), *others in tied.values():
        for module, name in others:
            module._parameters[name] = first._parameters[its_name]


def _folder(directory: str | os.PathLike[str] | None) -> pathlib.Path:
    run = folder_of_run()
    if directory is None and run is not None:
        directory = run / "weights"
    return pathlib.Path(scratch_folder(directory, "directory"))


def _written(blocks: list[_Block], path: pathlib.Path, reader: WeightReader) -> dict[str, Place]:
    """Writes the blocks' weights to `path`; returns their places by name.

    Afterwards `reader` has this very file open: other processes, such as ranks, may write one of the same name.
    """
    with replaced(path, f"{path.name}.{os.getpid()}", durable=False) as partial:
        write_tensors(partial, {owned.full_name: owned.parameter for block in blocks for owned in block.owned})
        places = places_in(partial)
        reader.open(partial, path)
    for place in places.values():
        place.path = path
    return places
