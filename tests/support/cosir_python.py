# SPDX-License-Identifier: Apache-2.0
"""The recipe `cosir` in a process of its own.

    python -m tests.support.cosir_python JOBS    [[NAME of a function of plimsoll, arguments, options], …] as JSON

The last line is JSON: of each job what the function returned, or [the error's type, its text].
"""
import json
import sys

import numpy as np

import plimsoll
import plimsoll.errors

NAME = "cosir"


def made(function, arguments, options):
    try:
        return getattr(plimsoll, function)(*arguments, **options)
    except (ValueError, plimsoll.errors.BudgetExceeded) as error:
        return [type(error).__name__, str(error)]


def make_pairs(folder, groups=400, image=24, text=16, seed=5):
    """Writes pairs of one to four texts an image, with ids in no order: a text is its image's features and noise."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, groups)
    rows = int(sizes.sum())
    hidden = rng.standard_normal((groups, 8))
    seen = [hidden @ rng.standard_normal((8, width)) for width in (image, text)]
    group = np.repeat(np.arange(groups), sizes)
    ids = rng.permutation(10 * rows)[:rows].astype(np.int64)
    with plimsoll.Governor("4GiB") as governor:  # Beside what other tests left.
        columns = {"image": ("float32", (image,)), "text": ("float16", (text,))}
        with plimsoll.FeatureWriter(governor, folder, columns, grouped=True) as writer:
            noise = rng.standard_normal((rows, text)) * 0.3
            writer.append(ids, image=seen[0][group].astype(np.float32), text=(seen[1][group] + noise).astype(np.float16), groups=group)
    return rows


if __name__ == "__main__":
    print(json.dumps([made(*job) for job in json.loads(sys.argv[1])]))
