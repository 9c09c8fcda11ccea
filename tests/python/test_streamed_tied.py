# SPDX-License-Identifier: Apache-2.0
"""plimsoll.stream_frozen with parameters that are in several places: bits of the model as it was, and values that are there."""
import pytest

torch = pytest.importorskip("torch")

from test_streamed import same

import plimsoll
from plimsoll.training import _weight_files
from tests.support import tied_models
from tests.support.tied_models import TIES, Net, trained


@pytest.mark.parametrize("tie", TIES, ids=lambda tie: tie.__name__)
def test_what_is_tied_trains_to_the_bits_of_the_model_as_it_was(tie, governor, tmp_path):
    untouched, held = trained(tie, lambda model: None)
    streamed, left = trained(tie, lambda model: plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path))
    assert same(streamed, untouched) and len(left) == TIES[tie] < len(held), left


def test_files_have_what_is_tied_under_one_of_its_names(governor, tmp_path):
    """The last one; in safetensors files a tensor is there once."""
    torch.manual_seed(1)
    plain = Net().requires_grad_(False)
    tied_models.a_parameter_of_two_blocks(plain)
    values = plain.state_dict()
    del values["blocks.1.base.weight"]
    _weight_files.write_tensors(file := tmp_path / "m.safetensors", values)
    with torch.device("meta"):
        model = Net().requires_grad_(False)
    tied_models.a_parameter_of_two_blocks(model)
    plimsoll.stream_frozen(model, file, weights="streamed")
    assert model.blocks[1].base.weight is model.blocks[3].base.weight
    ids = torch.arange(11)[None]
    assert torch.equal(model(ids), plain(ids))


def test_a_model_of_nothing_but_one_block_is_told_what_is_tied(governor):
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False).requires_grad_(False) for _ in range(2))
    model.blocks[1].weight = model.blocks[0].weight
    with pytest.raises(ValueError, match="blocks.0.weight is blocks.1.weight, too, so it stays in memory"):
        plimsoll.stream_frozen(model, weights="streamed")


def test_a_state_of_tied_weights_is_loaded_again(governor, tmp_path):
    tied_models.a_module_of_two_blocks(model := Net())
    plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
    state = model.state_dict()
    assert state["blocks.0.base.weight"].shape == (32, 32) and state["blocks.1.base.weight"].dim() == 0
    model.load_state_dict(state)
