# SPDX-License-Identifier: Apache-2.0
"""README.md's Python blocks as printed, and the bits in which the first of them ends.

For tests/python/test_readme.py and tools/demo.py.
"""
import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"

# Goes behind the first block: prints "bits" and a SHA-256 of all that a resumption has to bring back.
BITS = """
import hashlib
digest = hashlib.sha256()
def add(value):
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            add(value[key])
    elif isinstance(value, list):
        for one in value:
            add(one)
    else:
        digest.update(repr(value).encode())
add(model.state_dict())
add(optimizer.state_dict())
add(torch.get_rng_state())
with plimsoll.Governor("4GiB") as governor:
    again = plimsoll.EmbeddingStore.open(governor, "quickstart/items", rows=items)
    assert again.last_commit == 300
    again.scan(lambda ids, sequences, values: [digest.update(part.tobytes()) for part in (ids, sequences, values)])
print("bits", digest.hexdigest())
"""


def blocks() -> list[str]:
    """The Python blocks, in order. Fails where there is none."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "README.md has no Python block"
    return found
