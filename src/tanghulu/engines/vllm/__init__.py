"""vLLM's plug points: ``connector`` for its KV transfer (KVConnectorBase_V1). The only folder that imports vLLM."""
