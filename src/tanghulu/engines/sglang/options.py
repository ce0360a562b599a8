"""The options of SGLang's connector: what users write into ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tanghulu.engines.common.options import StoreOptions

_log = logging.getLogger(__name__)

#: What SGLang itself reads in the same table.
SGLANGS_OWN = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "file_storage_path"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        "hicache_storage_pass_prefix_keys",
    }
)


@dataclass(frozen=True, kw_only=True)
class HiCacheOptions(StoreOptions):
    """See docs/engines/sglang.md; the names are those of the keys beside SGLang's own."""

    lookup_deadline_s: float = 1.0

    @classmethod
    def of_sglang(cls, extra_config: Mapping[str, Any]) -> Self:
        """Our part of the table; raises ConfigError that names an unknown key, or what is wrong with a value."""
        options = cls.parse({name: value for name, value in extra_config.items() if name not in SGLANGS_OWN})
        if not extra_config.get("interface_v1"):
            _log.warning(
                'tanghulu: every page is copied once more: put "interface_v1": 1 into '
                "--hicache-storage-backend-extra-config"
            )
        return options
