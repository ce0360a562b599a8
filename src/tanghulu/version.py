"""The version, defined once; setuptools reads it from here."""

__version__ = "0.1.0"
