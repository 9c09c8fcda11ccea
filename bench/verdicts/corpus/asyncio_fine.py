# SPDX-License-Identifier: Apache-2.0
"""Tasks that are awaited."""
# /// truth
# leaks = false
# ///
import asyncio

from watched import steps


async def deliver(answer, wanted):
    await wanted.wait()
    return len(answer)


async def main():
    wanted = asyncio.Event()
    wanted.set()
    for step in steps():
        await asyncio.create_task(deliver(b"x" * 150_000, wanted))


asyncio.run(main())
