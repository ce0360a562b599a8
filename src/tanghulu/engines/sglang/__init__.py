"""SGLang's third level of cache: pages that leave its host memory are kept in the store (``HiCacheStorage``)."""
