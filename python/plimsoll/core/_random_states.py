# SPDX-License-Identifier: Apache-2.0
"""The states of all random generators that a training step may draw from, kept and restored bit for bit.

Threads: the thread that trains.
Memory:  a few KiB for each of torch, Python, NumPy and every generator of the program's own; for each device in use the
         size of its generator's state, which is 16 bytes on CUDA. Copies share the states that did not change.
"""
from __future__ import annotations

import contextlib
import copy
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ._devices import devices_in_use


class RandomStates:
    """Copies of the random states at the moment of construction: those of torch, its devices in use, Python, NumPy and
    `generators` (see _reach.is_generator()).

    like: earlier states; a state that has not changed since is shared with them.
    """

    def __init__(self, generators: Iterable[Any] = (), like: RandomStates | None = None) -> None:
        import torch

        # Kept as bytes: a tensor would count as memory of a measured step.
        self._torch = torch.get_rng_state().numpy().tobytes()
        self._devices = {kind: _states_of(module) for kind, module in _devices().items()}
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state(legacy=False) if numpy is not None else None
        self._own = [_kept(one) for one in generators]
        if like is not None:
            self._torch = like._torch if like._torch == self._torch else self._torch
            self._python = like._python if like._python == self._python else self._python

    def to_plain(self) -> dict[str, Any]:
        """Returns the states as tensors, lists and numbers, for a checkpoint."""
        devices = {kind: [_bytes_as_tensor(one) for one in states] for kind, states in self._devices.items()}
        states: dict[str, Any] = {"torch": _bytes_as_tensor(self._torch), "devices": devices, "python": self._python, "numpy": None}
        if self._numpy is not None:
            states["numpy"] = _plain(self._numpy)
            if self._numpy["bit_generator"] == "MT19937":  # In the form of get_state()'s default.
                mersenne = self._numpy["state"]
                states["numpy"] = ["MT19937", mersenne["key"].tolist(), mersenne["pos"], self._numpy["has_gauss"],
                                   self._numpy["gauss"]]
        return states

    @classmethod
    def from_plain(cls, states: dict[str, Any]) -> RandomStates:
        """Makes the states from the result of to_plain()."""
        made = cls.__new__(cls)
        made._torch, made._python, made._numpy = states["torch"].numpy().tobytes(), states["python"], None
        if "devices" not in states:  # An older checkpoint, which has CUDA's states alone.
            states = {**states, "devices": {} if states["cuda"] is None else {"cuda": states["cuda"]}}
        made._devices = {kind: [one.numpy().tobytes() for one in every] for kind, every in states["devices"].items()}
        if isinstance(states["numpy"], dict):
            made._numpy = _arrays(states["numpy"])
        elif states["numpy"] is not None:
            import numpy

            name, keys, *rest = states["numpy"]
            made._numpy = (name, numpy.array(keys, numpy.uint32), *rest)
        made._own = []
        return made

    def put_back(self) -> None:
        """Restores the states; may be called more than once. Errors: RuntimeError where a device of theirs is missing."""
        import torch

        torch.set_rng_state(_bytes_as_tensor(self._torch))
        for kind, states in self._devices.items():
            _set_states(torch.get_device_module(kind), [_bytes_as_tensor(one) for one in states])
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for put_back in self._own:
            put_back()


def _devices() -> dict[str, Any]:
    """Returns torch's modules of the devices in use that have generators, by kind."""
    return {kind: module for kind, module in devices_in_use().items() if hasattr(module, "get_rng_state")}


def _states_of(module: Any) -> list[bytes]:
    """Returns the state of each device of a kind; MPS has one."""
    every = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return [one.cpu().numpy().tobytes() for one in every]


def _set_states(module: Any, states: list[Any]) -> None:
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    else:
        module.set_rng_state(states[0])


@contextlib.contextmanager
def kept_random(devices: bool = False) -> Iterator[None]:
    """Restores the states of Python's, NumPy's and torch's main generators after the block. devices: those of devices too."""
    import torch

    states = torch.default_generator.get_state(), random.getstate(), sys.modules["numpy"].random.get_state(legacy=False)
    of_devices = [(module, _states_of(module)) for module in (_devices() if devices else {}).values()]
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        sys.modules["numpy"].random.set_state(states[2])
        for module, every in of_devices:
            _set_states(module, [_bytes_as_tensor(one) for one in every])


def seed_main(seed: int, devices: bool = False) -> None:
    """Seeds Python's, NumPy's and torch's main generators. devices: those of devices too, as torch.manual_seed() does."""
    import torch

    random.seed(seed)
    sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    for module in (_devices() if devices else {}).values():
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def mixed(seed: int, epoch: int, index: int, purpose: int) -> int:
    """Returns a seed derived from (seed, epoch, index) and a purpose, each from −2**63 to 2**63 − 1."""
    key = struct.pack("<qqqq", seed, epoch, index, purpose)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def generator_state(one: Any) -> Any:
    """Returns the state of a generator (see _reach.is_generator()) as tensors, texts, numbers, lists and dicts."""
    import torch

    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, random.Random):
        return one.getstate()
    if hasattr(one, "bit_generator"):
        return _plain(one.bit_generator.state)
    return _plain(list(one.get_state()))


def set_generator_state(one: Any, state: Any) -> None:
    """Restores a state that generator_state() returned."""
    import torch

    if isinstance(one, torch.Generator):
        one.set_state(state)
    elif isinstance(one, random.Random):
        one.setstate(state)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = _arrays(state)
    else:
        one.set_state(tuple(_arrays(state)))


def _plain(value: Any) -> Any:
    """Replaces NumPy's arrays by {"array": numbers, "dtype": name}, as a checkpoint cannot load arrays safely."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if type(value).__module__ == "numpy":
        return {"array": value.tolist(), "dtype": value.dtype.name}
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"array", "dtype"}:
            return sys.modules["numpy"].array(value["array"], value["dtype"])
        return {key: _arrays(inner) for key, inner in value.items()}
    return [_arrays(inner) for inner in value] if isinstance(value, list) else value


def _kept(one: Any) -> Callable[[], object]:
    """Returns a function that restores the generator's present state."""
    import torch

    if isinstance(one, torch.Generator):
        state = one.get_state().numpy().tobytes()
        return lambda: one.set_state(_bytes_as_tensor(state))
    if isinstance(one, random.Random):
        drawn = one.getstate()
        return lambda: one.setstate(drawn)
    if hasattr(one, "bit_generator"):
        drawn = copy.deepcopy(one.bit_generator.state)
        return lambda: setattr(one.bit_generator, "state", drawn)
    drawn = one.get_state()
    return lambda: one.set_state(drawn)


def _bytes_as_tensor(state: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
