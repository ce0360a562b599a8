"""The package ``mooncake`` with tanghulu's ``store``; its other modules are those of an installed Mooncake."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
