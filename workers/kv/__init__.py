"""KV on its way in and out of the cache: the store, other workers, exports, staging."""
