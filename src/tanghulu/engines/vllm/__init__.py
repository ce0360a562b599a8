"""vLLM's plug points: ``connector`` for its KV transfer (KVConnectorBase_V1), ``tier`` for its native offloading. The
only folder that imports vLLM."""
