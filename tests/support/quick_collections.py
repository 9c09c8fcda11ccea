# SPDX-License-Identifier: Apache-2.0
"""For tests that collect garbage often: what is there before one, modules of torch's above all, is not looked through each time."""
import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def collections_are_whole_again():
    """After the last test of a file a collection looks at everything."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def collections_are_quick(collections_are_whole_again):
    """Inside, a collection looks at what the test made. It is garbage as ever; a file has this by importing both."""
    gc.collect()
    gc.freeze()
