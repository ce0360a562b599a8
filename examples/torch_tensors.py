"""Keep the KV cache of a prompt's block as a torch tensor, with a checksum a layer, and read parts of it.

Needs a running store, such as `tanghulu up`, and torch. You will see a tensor come back equal, with its dtype and shape
where it was put as one, and without a copy where the node is on this host; one layer read by itself, and a tensor of
your own filled in place.

    python examples/torch_tensors.py [MASTER, default 127.0.0.1:7400]
"""

import sys

import torch

import tanghulu

LAYERS, TOKENS, HEADS, WIDTH = 8, 64, 4, 64
KEY = "example/tensors/block-0"


def main(master: str) -> None:
    kv = torch.randn(LAYERS, 2, TOKENS, HEADS, WIDTH, dtype=torch.float32).to(torch.bfloat16)
    layer_bytes = kv[0].numel() * kv.element_size()
    with tanghulu.connect(master) as store:
        store.remove(KEY)
        store.put(KEY, kv, part_bytes=layer_bytes)
        print("stored:", tuple(kv.shape), kv.dtype, kv.numel() * kv.element_size(), "bytes")

        with store.get(KEY) as chunk:
            again = chunk.torch(torch.bfloat16, tuple(kv.shape), shared=True)  # do not write to it
            print("equal:", torch.equal(again, kv))
            del again

        with store.get_range(KEY, 3 * layer_bytes, layer_bytes) as part:  # only this layer is moved and verified
            print("layer 3 alone:", torch.equal(part.torch(torch.bfloat16, tuple(kv[3].shape)), kv[3]))

        store.remove(f"{KEY}/described")
        store.put_tensor(f"{KEY}/described", kv[:, 0])
        described = store.get_tensor(f"{KEY}/described")
        print("with dtype and shape:", described.dtype, tuple(described.shape), torch.equal(described, kv[:, 0]))

        mine = torch.zeros_like(kv)
        print("filled in place:", store.get_into(KEY, mine), "bytes, equal:", torch.equal(mine, kv))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400")
