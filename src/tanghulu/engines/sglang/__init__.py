"""SGLang's third level of cache: pages that leave its host memory lie in the store (``HiCacheStorage``)."""
