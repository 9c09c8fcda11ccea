# SPDX-License-Identifier: Apache-2.0
"""Models some of whose parameters are in several places, and a few steps of each."""
import torch

import plimsoll

WIDTH = 32


class Block(torch.nn.Module):
    """A frozen map, and a trained one of rank 4 beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.more = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.a, self.b = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)
        for part in (self.base, self.more):
            part.requires_grad_(False)

    def forward(self, x):
        return x + torch.tanh(self.more(torch.tanh(self.base(x) + self.b(self.a(x)))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Embedding(11, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(5))
        self.map = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)

    def forward(self, ids):
        x = self.first(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.map(x))


def plain(model):
    pass


def embedding_is_head(model):
    model.head.weight = model.first.weight


def frozen_embedding_is_head(model):
    model.head.weight = model.first.weight.requires_grad_(False)


def a_parameter_of_two_blocks(model):
    model.blocks[3].base.weight = model.blocks[1].base.weight


def a_module_of_two_blocks(model):
    model.blocks[4].base = model.blocks[0].base


def a_trained_module_of_two_blocks(model):
    model.blocks[4].a = model.blocks[0].a


def a_parameter_of_a_block_and_the_rest(model):
    model.map.weight = model.blocks[2].base.weight


def a_module_of_a_block_and_the_rest(model):
    model.map = model.blocks[2].more


def a_parameter_twice_in_a_block(model):
    model.blocks[1].more.weight = model.blocks[1].base.weight


def a_module_twice_in_a_block(model):
    model.blocks[1].more = model.blocks[1].base


def a_block_twice(model):
    model.blocks[3] = model.blocks[1]


def blocks_under_two_names(model):
    model.others, model.favourite = torch.nn.ModuleList(model.blocks), model.blocks[2]


def a_view_of_a_trained_one(model):
    model.blocks[0].trained = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    model.blocks[1].base.weight = torch.nn.Parameter(model.blocks[0].trained.detach(), requires_grad=False)
    model.blocks[0].register_forward_hook(lambda block, _, x: x @ block.trained)


def a_view_of_a_frozen_one(model):
    model.blocks[1].base.weight = torch.nn.Parameter(model.blocks[0].base.weight.detach().t(), requires_grad=False)


TIES = {  # And the frozen parameters of blocks that stay in memory for it.
    plain: 0, embedding_is_head: 0, frozen_embedding_is_head: 0, a_parameter_of_two_blocks: 2, a_module_of_two_blocks: 4,
    a_trained_module_of_two_blocks: 0, a_parameter_of_a_block_and_the_rest: 1, a_module_of_a_block_and_the_rest: 2,
    a_parameter_twice_in_a_block: 2, a_module_twice_in_a_block: 0, a_block_twice: 0, blocks_under_two_names: 0,
    a_view_of_a_trained_one: 1, a_view_of_a_frozen_one: 2}
# What torch's model.to(device) parts.
VIEWS = (a_view_of_a_trained_one, a_view_of_a_frozen_one)


def trained(tie, stream, where="cpu"):
    """(losses and what was trained; the names of blocks' frozen parameters that have values in the end). stream: is given the model, to
    bring it where it trains."""
    from plimsoll.training._absent import Absent

    torch.manual_seed(1)
    tie(model := Net())
    stream(model)
    held = [name for name, one in model.blocks.named_parameters(remove_duplicate=False) if not one.requires_grad and not isinstance(one, Absent)]
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    step = plimsoll.TrainingStep(model, optimizer)
    batch, losses = torch.arange(22).reshape(2, 11).remainder(11).to(where), []
    for _ in range(3):
        losses.append(step(batch, lambda ids: torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())))
    return [torch.tensor(losses), *(one.detach().cpu() for one in model.parameters() if one.requires_grad)], held
