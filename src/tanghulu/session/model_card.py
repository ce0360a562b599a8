"""The description of a model served by a worker."""

from __future__ import annotations

from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.session.sampling import SamplingDefaults
from tanghulu.types import Fingerprint


class ModelCard(FastMessage, frozen=True):
    """The model served by the worker. ``block_hash`` is a name of ``hashing.HASH_FUNCTIONS``.

    ``secret_check`` is the worker's ``ClusterSecret.check_value``, empty without a cluster secret.
    """

    model: str
    fingerprint: Fingerprint
    block_hash: str
    block_tokens: U32
    context_length: U32
    vocab_size: U32
    eos_token_ids: tuple[U32, ...]
    tokenizer_json_zlib: bytes
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    block_bytes: U64
    kv_dtype: str = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    secret_check: bytes = b""

    def __repr__(self) -> str:
        return f"<ModelCard {self.model}, {self.block_tokens} tokens a block>"
