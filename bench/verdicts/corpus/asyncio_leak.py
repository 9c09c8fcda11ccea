# SPDX-License-Identifier: Apache-2.0
"""Tasks that wait for ever, each with the answer it was made for."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 150000
# holder = "tasks|Task|coroutine|answer|deliver"
# ///
import asyncio

from watched import steps

tasks = set()


async def deliver(answer, wanted):
    await wanted.wait()
    return len(answer)


async def main():
    wanted = asyncio.Event()
    for step in steps():
        answer = b"x" * 150_000  # site
        tasks.add(asyncio.create_task(deliver(answer, wanted)))
        await asyncio.sleep(0)
    wanted.set()


asyncio.run(main())
