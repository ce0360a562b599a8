"""Use the store from asyncio: a consumer waits for keys that a producer puts later, all on one event loop.

Needs a running store, such as `tanghulu up`. You will see the consumer begin to wait, the producer put three blocks,
and the consumer hear of each at once: the master answers its call when the key is announced, nobody polls.

    python examples/asyncio_client.py [MASTER, default 127.0.0.1:7400]
"""

import asyncio
import sys

import tanghulu.aio

KEYS = [f"example/asyncio/{number}" for number in range(3)]


async def produce(store: tanghulu.aio.AsyncClient) -> None:
    for key in KEYS:
        await asyncio.sleep(0.2)
        await store.put(key, f"block of {key}".encode())
        print("put", key)


async def consume(store: tanghulu.aio.AsyncClient) -> None:
    print("waiting for", len(KEYS), "keys")
    for key in KEYS:
        if not await store.wait_for(key, deadline_s=10):
            print("nobody put", key)
            return
        with await store.get(key) as chunk:
            print("got", chunk.bytes().decode())


async def main(master: str) -> None:
    async with tanghulu.aio.connect(master) as store:
        await store.remove_many(KEYS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consume(store))
            tasks.create_task(produce(store))
        print("all there:", await store.exists_many(KEYS))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
