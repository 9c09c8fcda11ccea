# SPDX-License-Identifier: Apache-2.0
"""plimsoll.stream_frozen: torch.utils.checkpoint around parts of a block, which run again in backward when their block has run."""
import pytest

torch = pytest.importorskip("torch")

from test_streamed import same

import plimsoll
from plimsoll.training._weight_ring import WeightRing
from tests.support.parts import HOW, bits_of, made


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"cache_bytes": "64KiB"}])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("parts", HOW)
def test_parts_of_blocks_that_run_again_have_the_same_bits(governor, tmp_path, parts, reentrant, options):
    model = made(parts, reentrant)
    plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path, **options)
    assert same(bits_of(model), bits_of(made(parts)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_whose_block_is_not_in_memory_any_more_has_it_read_again(governor, tmp_path, monkeypatch, reentrant):
    model = made("one", reentrant)
    streamed = plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
    use, again = WeightRing.use, []

    def another_first(self, block, after=None):
        if after is None and block not in again:
            again.append(block)
            for one in (block + 1, block + 2):
                use(self, one % self.count, [])
        return use(self, block, after)

    monkeypatch.setattr(WeightRing, "use", another_first)
    assert same(bits_of(model), bits_of(made("one"))) and sorted(again) == [0, 1, 2, 3, 4]
    streamed.close()


def test_weights_are_not_written_in_backward(governor, tmp_path):
    model = made("one")
    plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
    model.blocks[2].a.weight.register_hook(lambda _: model.blocks[2].base.weight.zero_())
    with pytest.raises(RuntimeError, match=r"blocks.2.base.weight is on disk .*: zero_ asked for its values outside"):
        bits_of(model)
