"""Put values into the store, get them back, and see what an absent key says.

Needs a running store, such as `tanghulu up`. You will see a put that is new and one that was there already, the value
as the store's own memory and as bytes, how much of a prompt's chain of keys is there, and the error for a missing key.

    python examples/put_and_get.py [MASTER, default 127.0.0.1:7400]
"""

import sys

import tanghulu
from tanghulu.errors import ChunkNotFound


def main(master: str) -> None:
    with tanghulu.connect(master) as store:
        store.remove_matching("^example/put/")
        print("existed before:", store.put("example/put/a", b"first block").existed)
        print("existed now:", store.put("example/put/a", b"first block").existed)

        with store.get("example/put/a") as chunk:  # where the node is on this host: a view of its memory, no copy
            print("value:", chunk.bytes(), "of", chunk.size_bytes, "bytes")

        buffer = bytearray(11)
        print("read into a buffer:", store.get_into("example/put/a", buffer), bytes(buffer))

        chain = [f"example/put/{name}" for name in "abcd"]
        store.put_many([(chain[1], b"second block"), (chain[3], b"fourth block")])
        print("keys there:", store.exists_many(chain), "- usable as a prefix:", store.match_prefix(chain))

        try:
            store.get(chain[2])
        except ChunkNotFound as error:
            print("not found:", error)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400")
